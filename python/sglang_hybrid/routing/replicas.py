"""Which replica of one server gets a prompt, where a process in front of them sees every prompt and their loads.

Nobody tells it what they hold, so what a replica was sent last stands for it, as much as its KV has room for.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.routing.index import Reach, block_hashes
from sglang_hybrid.routing.policies import Clock, Offer, Prompt, RestartPoints
from sglang_hybrid.routing.sent import SentPages


class Load(NamedTuple):
    """What a replica said of itself at `at`, in seconds of the epoch: requests in it, prompt tokens that wait to be
    computed, tokens that its KV has room for, and requests that it runs at once."""

    at: float
    requests: int
    waiting_tokens: int
    kv_tokens: int
    most_requests: int


UNHEARD = Load(0.0, 0, 0, 1 << 20, 1 << 30)
"""Of a replica that has not said anything yet."""

LATER_S = 1.0
"""What was sent so long before a load was taken is in it, unless a pass took longer."""


class _Replica:
    """Its last load, and what was sent to it that may not be in there: until the second load that is read behind it, or
    one that was taken later."""

    def __init__(self) -> None:
        self.load = UNHEARD
        self._reads, self._tokens = 0, 0
        self._sent: deque[tuple[float, int, int]] = deque()  # when, loads read before, tokens to compute

    def hear(self, load: Load) -> None:
        if load.at == self.load.at:
            return
        self.load = load
        self._reads += 1
        while self._sent and (self._reads - self._sent[0][1] >= 2 or load.at - self._sent[0][0] > LATER_S):
            self._tokens -= self._sent.popleft()[2]

    def send(self, now: float, tokens: int) -> None:
        self._sent.append((now, self._reads, tokens))
        self._tokens += tokens

    def offer(self, held_tokens: int) -> Offer:
        running = self.load.requests + len(self._sent)
        waiting, reach = self.load.waiting_tokens + self._tokens, Reach(held_tokens, held_tokens)
        return Offer(reach, waiting, running, running >= self.load.most_requests)


class Replicas:
    """The replica where a prompt costs least, by the measure of `RestartPoints`."""

    PAGE_TOKENS = 64
    """Prompts that share less share nothing worth a busier replica."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._policy = RestartPoints(clock)
        self._replicas: defaultdict[int, _Replica] = defaultdict(_Replica)
        self._sent: SentPages | None = None

    def hear(self, loads: Mapping[int, Load]) -> None:
        """The loads as they are now; one that is as old as the last is passed over."""
        for rank, load in loads.items():
            self._replicas[rank].hear(load)

    def forget(self) -> None:
        """No replica holds anything of what it was sent; how busy they are stays as it is."""
        self._policy, self._sent = RestartPoints(self._clock), None

    def choose(self, tokens: Tokens | list[int], salt: str | None, ranks: Sequence[int]) -> int | None:
        """The one of `ranks` that is to get the prompt `tokens`, and will; None if the prompt is shorter than a page.

        `salt` is what keeps prompts of equal tokens apart: an adapter, a tenant.
        """
        names = block_hashes(tokens[:-1], self.PAGE_TOKENS, salt)
        if not names or not ranks:
            return None
        if self._sent is None:  # replicas are alike
            room = max(self._replicas[rank].load.kv_tokens for rank in ranks)
            self._sent = SentPages(max(1, room // self.PAGE_TOKENS))
        offers = {}
        for rank in ranks:
            held = self._sent.pages(str(rank), names) * self.PAGE_TOKENS
            offers[str(rank)] = self._replicas[rank].offer(held)
        chosen = self._policy.choose(Prompt(len(tokens), names, self.PAGE_TOKENS), offers)
        self._replicas[int(chosen)].send(self._clock(), self._policy.left_tokens)
        self._sent.add(chosen, names)
        return int(chosen)
