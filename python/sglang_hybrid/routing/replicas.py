"""Which replica of one server gets a prompt, where a process in front of them sees every prompt and their loads.

Nobody tells it what they hold, so what a replica was sent last stands for it, as much as its KV has room for.
"""

import time
from collections import deque
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


class _Way:
    """What was sent to a replica and may not be in its load: until the second one that is read, or one taken later."""

    def __init__(self) -> None:
        self._reads, self.tokens = 0, 0
        self._sent: deque[tuple[float, int, int]] = deque()  # when, loads read before, tokens to compute

    @property
    def requests(self) -> int:
        return len(self._sent)

    def read(self, at: float) -> None:
        self._reads += 1
        while self._sent and (self._reads - self._sent[0][1] >= 2 or at - self._sent[0][0] > LATER_S):
            self.tokens -= self._sent.popleft()[2]

    def add(self, now: float, tokens: int) -> None:
        self._sent.append((now, self._reads, tokens))
        self.tokens += tokens


class Replicas:
    """The replica where a prompt costs least, by the measure of `RestartPoints`."""

    PAGE_TOKENS = 64
    """Prompts that share less share nothing worth a busier replica."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._policy = RestartPoints(clock)
        self._loads: dict[int, Load] = {}
        self._ways: dict[int, _Way] = {}
        self._sent: dict[int, SentPages] = {}

    def hear(self, loads: Mapping[int, Load]) -> None:
        """The loads as they are now; one that is as old as the last is passed over."""
        for rank, load in loads.items():
            if load.at != self._loads.get(rank, UNHEARD).at:
                self._loads[rank] = load
                self._ways.setdefault(rank, _Way()).read(load.at)

    def choose(self, tokens: Tokens | list[int], salt: str | None, ranks: Sequence[int]) -> int | None:
        """The one of `ranks` that is to get the prompt `tokens`, and will; None if the prompt is shorter than a page.

        `salt` is what keeps prompts of equal tokens apart: an adapter, a tenant.
        """
        names = block_hashes(tokens[:-1], self.PAGE_TOKENS, salt)
        if not names or not ranks:
            return None
        offers = {str(rank): self._offer(rank, names) for rank in ranks}
        chosen = int(self._policy.choose(Prompt(len(tokens), names, self.PAGE_TOKENS), offers))
        self._ways.setdefault(chosen, _Way()).add(self._clock(), self._policy.left_tokens)
        self._sent_to(chosen).add("", names)
        return chosen

    def _offer(self, rank: int, names: Sequence[int]) -> Offer:
        load, way = self._loads.get(rank, UNHEARD), self._ways.setdefault(rank, _Way())
        held = self._sent_to(rank).pages("", names) * self.PAGE_TOKENS
        running = load.requests + way.requests
        return Offer(Reach(held, held), load.waiting_tokens + way.tokens, running, running >= load.most_requests)

    def _sent_to(self, rank: int) -> SentPages:
        sent = self._sent.get(rank)
        if sent is None:
            room = self._loads.get(rank, UNHEARD).kv_tokens // self.PAGE_TOKENS
            sent = self._sent[rank] = SentPages(max(1, room))
        return sent
