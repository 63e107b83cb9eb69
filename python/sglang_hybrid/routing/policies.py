"""Which worker gets a prompt. The router's process and the simulator ask the same objects.

A policy hears of nothing but the prompts that it is asked for: what else it needs is in the offers. Each is bounded in
memory, draws no random numbers, and gives equal workers their turn, the one first that got nothing for longest.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.routing.index import NOTHING, Reach
from sglang_hybrid.routing.sent import Coming, SentPages

Clock = Callable[[], float]


class Prompt(NamedTuple):
    """What is asked: so many `tokens`; `names` are those of the whole pages before the last one (`index.block_hashes`).

    `session` is what the client calls requests that belong together, None if it says nothing.
    """

    tokens: int
    names: Sequence[int]
    page_tokens: int
    session: str | None = None


class Offer(NamedTuple):
    """What one worker offers for a prompt, as far as the router knows.

    `waiting_tokens`: prompt tokens to compute of requests sent there whose first token has not come. `running`:
    requests sent there that have not ended. `full`: it runs no more at once; the next waits until one ends.
    """

    reach: Reach = NOTHING
    waiting_tokens: int = 0
    running: int = 0
    full: bool = False


class RoutingPolicy(Protocol):
    """Chooses workers.

    `left_tokens`: of the prompt chosen for last, those that are left to compute where it was sent, as far as is known.
    Whoever counts the tokens that wait counts these: what is on its way is not in an offer yet.
    """

    left_tokens: int

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        """The worker that gets `prompt`, one of `offers`, which is never empty. It will be sent there."""
        ...


class Turns:
    """Equal workers take turns."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._count = 0

    def least(self, costs: Mapping[str, float | tuple[float, ...]]) -> str:
        """The worker of the lowest cost; of several the one that was chosen longest ago."""
        latest = self._latest
        if len(latest) > 2 * len(costs) + 64:
            self._latest = latest = {worker: at for worker, at in latest.items() if worker in costs}
        chosen = min(costs, key=lambda worker: (costs[worker], latest.get(worker, 0), worker))
        self._count += 1
        latest[chosen] = self._count
        return chosen


class RoundRobin:
    """Each worker in turn."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._turns = Turns()
        self.left_tokens = 0

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        chosen = self._turns.least(dict.fromkeys(offers, 0.0))
        self.left_tokens = prompt.tokens - offers[chosen].reach.resume_tokens
        return chosen


class LeastLoad:
    """The worker with the fewest requests; of equals the one with the fewest tokens that wait."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._turns = Turns()
        self.left_tokens = 0

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        chosen = self._turns.least({name: (offer.running, offer.waiting_tokens) for name, offer in offers.items()})
        self.left_tokens = prompt.tokens - offers[chosen].reach.resume_tokens
        return chosen


class Sessions:
    """The worker that had the last request of a session, unless others have much less to do; without one, least load.

    For workers that do not tell what they hold: a client's word (`prompt_cache_key`) is what is known of a prompt then.
    """

    MORE_REQUESTS = 4
    """By which the worker of a session may have more than the one with the fewest."""
    MOST = 1 << 16

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._least = LeastLoad(clock)
        self._latest: OrderedDict[int, str] = OrderedDict()  # by the hash of a session's name
        self.left_tokens = 0

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        session = None if prompt.session is None else hash(prompt.session)
        known = None if session is None else self._latest.get(session)
        few = min(offer.running for offer in offers.values()) + self.MORE_REQUESTS
        if known is not None and known in offers and offers[known].running <= few:
            offers = {known: offers[known]}
        chosen = self._least.choose(prompt, offers)
        self.left_tokens = self._least.left_tokens
        if session is not None:
            self._latest[session] = chosen
            self._latest.move_to_end(session)
            if len(self._latest) > self.MOST:
                self._latest.popitem(last=False)
        return chosen


class Text:
    """SGLang's router (cache_aware): where most of the prompt was sent before, unless that is little or load is uneven.

    It believes that what was sent is held. Pages stand for its characters, and equal workers take turns, where SGLang
    takes the first.
    """

    MATCHED = 0.3  # of a prompt: with less the least loaded worker gets it
    MORE_REQUESTS, TIMES_REQUESTS = 64, 1.5  # by which loads may differ
    MOST_PAGES = 1 << 18
    GONE = 8  # workers that may be remembered in vain

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._turns = Turns()
        self._sent = SentPages(self.MOST_PAGES)
        self.left_tokens = 0

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        loads = {name: float(offer.running) for name, offer in offers.items()}
        if len(self._sent) > 2 * len(offers) + self.GONE:  # one that is not offered may be busy for a moment
            self._sent.keep(list(offers))
        least, most = min(loads.values()), max(loads.values())
        costs = loads
        if most - least <= self.MORE_REQUESTS or most <= self.TIMES_REQUESTS * least:
            pages = {name: self._sent.pages(name, prompt.names) for name in offers}
            if max(pages.values()) * prompt.page_tokens > self.MATCHED * prompt.tokens:
                costs = {name: float(-held) for name, held in pages.items()}
        chosen = self._turns.least(costs)
        self.left_tokens = prompt.tokens - offers[chosen].reach.resume_tokens
        self._sent.add(chosen, prompt.names)
        return chosen


class RestartPoints:
    """Ours: where a prompt costs least, in tokens that wait there, are left to compute, and have no KV there.

    What has no KV is stored in place of something else, so it counts beside its own computation. And a prompt whose KV
    is there without a state leaves a state on that branch; elsewhere it would leave KV alone once more.

    What prompts on their way will leave behind counts as there for `LIFE_S`: its events come after the prefill, and
    prompts that begin alike come close together.
    """

    REQUEST_TOKENS = 512
    """A request that runs costs as much as so many tokens: a fixed part of its prefill, steps of decoding, its slots.

    With half of it a popular beginning may keep its worker until that has no slots left; with twice as much prompts
    leave their beginnings for little (docs/decisions.md, "What a prompt costs on a worker").
    """
    FULL_TOKENS = 8192
    """To wait until a request ends costs as much as so many. Where all are full what they hold decides."""
    LIFE_S = 10.0
    MOST = 4096
    blocks_are_hits = False

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._turns = Turns()
        self._coming = Coming(self.LIFE_S, self.MOST)
        self.left_tokens = 0

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        now, tokens = self._clock(), prompt.tokens
        self._coming.expire(now)
        coming = self._coming.reaches(prompt.names, prompt.page_tokens)
        costs: dict[str, float | tuple[float, ...]] = {}
        expected: dict[str, Reach] = {}
        for name, offer in offers.items():
            soon = coming.get(name, NOTHING)
            kv = max(offer.reach.kv_tokens, soon.kv_tokens)
            resume = kv if self.blocks_are_hits else max(offer.reach.resume_tokens, soon.resume_tokens)
            expected[name] = Reach(resume, kv)
            load = self.REQUEST_TOKENS * offer.running + self.FULL_TOKENS * offer.full
            costs[name] = offer.waiting_tokens + (tokens - resume) + (tokens - kv) + load
        chosen = self._turns.least(costs)
        resume, kv = expected[chosen]
        self.left_tokens = tokens - resume
        pages = len(prompt.names)
        if pages:
            branch = kv // prompt.page_tokens
            self._coming.add(chosen, prompt.names, sorted({pages, branch} if resume < kv else {pages}), now)
        return chosen


class KvEvents(RestartPoints):
    """The same for models that resume wherever their KV ends: blocks are taken for hits, as Dynamo and llm-d do."""

    blocks_are_hits = True


@dataclass(frozen=True)
class Row:
    """A policy by name: how it is made, and whether it needs events of blocks and of states."""

    make: Callable[[Clock], RoutingPolicy]
    blocks: bool = False
    states: bool = False


POLICIES: dict[str, Row] = {
    "round_robin": Row(RoundRobin),
    "least_load": Row(LeastLoad),
    "sessions": Row(Sessions),
    "text": Row(Text),
    "kv_events": Row(KvEvents, blocks=True),
    "restart_points": Row(RestartPoints, blocks=True, states=True),
}


def find(name: str) -> Row:
    """The row of the policy called `name`; raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"unknown routing policy, choose one of {', '.join(POLICIES)}: {name}")
    return POLICIES[name]


def create(name: str, clock: Clock = time.monotonic) -> RoutingPolicy:
    """The policy called `name`, with `clock` in seconds; raises ConfigError for an unknown name."""
    return find(name).make(clock)
