"""What was sent to workers, whatever became of it: pages by their names, shared by all prompts that begin alike."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from sglang_hybrid.routing.index import Reach

_Holders = dict[str, int]  # worker -> how many prompts have the page there, or when the last one did


class SentPages:
    """Every page ever sent to each worker, at most `most_pages` of them for each: those that came last."""

    def __init__(self, most_pages: int) -> None:
        self._most_pages = most_pages
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def add(self, worker: str, names: Sequence[int]) -> None:
        pages = self._sent.setdefault(worker, OrderedDict())
        for name in reversed(names):  # so that a page is forgotten after those that follow it
            pages[name] = None
            pages.move_to_end(name)
        while len(pages) > self._most_pages:
            pages.popitem(last=False)

    def __len__(self) -> int:
        """Workers that something was sent to."""
        return len(self._sent)

    def keep(self, workers: Sequence[str]) -> None:
        """Forget what was sent to others."""
        for gone in self._sent.keys() - set(workers):
            del self._sent[gone]

    def pages(self, worker: str, names: Sequence[int]) -> int:
        """How many pages from the first on were sent to `worker`."""
        sent, low, high = self._sent.get(worker) or OrderedDict[int, None](), 0, len(names)
        while low < high:  # the pages sent are a tree: whoever got one got those before it
            middle = (low + high + 1) // 2
            low, high = (middle, high) if names[middle - 1] in sent else (low, middle - 1)
        return low


class _Prompt(NamedTuple):
    until_s: float
    worker: str
    names: tuple[int, ...]
    states: tuple[int, ...]  # pages behind which it leaves a state


class Coming:
    """What prompts on their way will leave behind, for `life_s` seconds and `most` prompts."""

    def __init__(self, life_s: float, most: int) -> None:
        self._life_s, self._most = life_s, most
        self._prompts: deque[_Prompt] = deque()
        self._pages: dict[int, _Holders] = {}
        self._states: dict[int, _Holders] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, worker: str, names: Sequence[int], states: Sequence[int], now: float) -> None:
        """A prompt of the pages `names` was sent to `worker`; it leaves states behind so many pages each."""
        prompt = _Prompt(now + self._life_s, worker, tuple(names), tuple([names[at - 1] for at in states]))
        self._prompts.append(prompt)
        for held, some in ((self._pages, prompt.names), (self._states, prompt.states)):
            for name in some:
                workers = held.setdefault(name, {})
                workers[worker] = workers.get(worker, 0) + 1
        self.expire(now)

    def expire(self, now: float) -> None:
        prompts = self._prompts
        while prompts and (prompts[0].until_s <= now or len(prompts) > self._most):
            prompt = prompts.popleft()
            for held, some in ((self._pages, prompt.names), (self._states, prompt.states)):
                for name in some:
                    _less(held, name, prompt.worker)

    def reaches(self, names: Sequence[int], page_tokens: int) -> dict[str, Reach]:
        """How far each worker will get with the prompt of the pages `names`, as far as that is on its way."""
        deepest, kv, resume = 0, dict[str, int](), dict[str, int]()
        while deepest < len(names) and names[deepest] in self._pages:
            deepest += 1
        for pages in range(deepest, 0, -1):
            holders = self._pages[names[pages - 1]]
            if len(holders) > len(kv):  # who holds a page holds those before it
                for worker in holders:
                    kv.setdefault(worker, pages)
            for worker in self._states.get(names[pages - 1], ()):
                resume.setdefault(worker, pages)
        return {worker: Reach(resume.get(worker, 0) * page_tokens, at * page_tokens) for worker, at in kv.items()}


def _less(held: dict[int, _Holders], name: int, worker: str) -> None:
    workers = held[name]
    workers[worker] -= 1
    if not workers[worker]:
        del workers[worker]
        if not workers:
            del held[name]
