"""Replay: a trace through a cache, in order of arrival; each request looks up when it comes and commits at once.

Nothing runs concurrently and the answer is known on arrival, as in Marconi's evaluation: what is compared is decisions.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.sim.prefix_cache import Commit
from sglang_hybrid.sim.trace import Tokens, Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Cache(Protocol):
    """What a replay asks of a cache; `open_cache` returns one."""

    def lookup(self, tokens: Tokens, now: float) -> int:
        """Tokens of `tokens` (a whole input) that the request can skip."""
        ...

    def commit(
        self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = (), hints: Hints = NO_HINTS
    ) -> object:
        """Input and output of a finished request, offered to the cache, with what its client declared."""
        ...

    def used_bytes(self) -> int:
        """Bytes of KV and checkpoints held now."""
        ...


@dataclass(frozen=True, eq=False)
class Replay:
    """What happened, per request; all arrays have shape (requests,)."""

    trace: Trace
    capacity_bytes: int
    hit_tokens: Ints
    used_bytes: Ints
    lookup_s: Floats
    commit_s: Floats
    evictions: int | None = None  # of the whole trace, where the cache counts them

    @property
    def n_input(self) -> Ints:
        return np.array([r.n_input for r in self.trace.requests], dtype=np.int64)

    @property
    def over_capacity_requests(self) -> int:
        """Requests after which the cache held more than its capacity; anything but 0 is a bug of the cache."""
        return int((self.used_bytes > self.capacity_bytes).sum())

    def check(self) -> None:
        """Raise InvariantError if the cache skipped more tokens than were asked or held more than it may."""
        wrong = np.flatnonzero((self.hit_tokens < 0) | (self.hit_tokens > self.n_input))
        if len(wrong):
            raise InvariantError(f"the cache skipped {self.hit_tokens[wrong[0]]} tokens of request {int(wrong[0])}")
        if self.over_capacity_requests:
            worst = int(self.used_bytes.max())
            raise InvariantError(f"the cache held more than its {self.capacity_bytes} bytes: {worst}")


def replay(trace: Trace, cache: Cache, capacity_bytes: int, timer: Callable[[], float] = time.perf_counter) -> Replay:
    """Run `trace` through `cache`; `timer` measures the cost of decisions and decides nothing."""
    check_capacity(capacity_bytes)
    n = len(trace)
    hits = np.zeros(n, dtype=np.int64)
    used = np.zeros(n, dtype=np.int64)
    lookup_s, commit_s = np.zeros(n), np.zeros(n)
    evictions: int | None = None
    for i, r in enumerate(trace.requests):
        tokens = r.input_tokens
        start = timer()
        hits[i] = cache.lookup(tokens, r.ts)
        middle = timer()
        said = () if r.hints is NO_HINTS else (r.hints,)  # a cache that knows no hints can be given none
        done = cache.commit(r.tokens, r.n_input, r.ts, r.boundaries, *said)
        end = timer()
        if isinstance(done, Commit):
            evictions = (evictions or 0) + done.evicted
        used[i] = cache.used_bytes()
        lookup_s[i], commit_s[i] = middle - start, end - middle
    return Replay(trace, capacity_bytes, hits, used, lookup_s, commit_s, evictions)


def check_capacity(capacity_bytes: int) -> None:
    """Raise ConfigError unless the capacity is a positive number of bytes."""
    if capacity_bytes <= 0:
        raise ConfigError(f"the capacity must be a positive number of bytes, got {capacity_bytes}")
