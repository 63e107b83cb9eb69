"""One clock for all ranks of a server: the first rank's, sent with the requests that it hands to the others.

Ranks must evict the same nodes, so they must agree on ages. Their own clocks differ, and SGLang sends no arrival time
to its schedulers. So the rank that receives requests appends a stamp to each batch of them, SGLang's broadcast carries
it to every rank, and each takes it out again before it handles the requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """The time in seconds at which the first rank took a batch of requests in."""

    seconds: float


class RankClock:
    """The latest stamp, in seconds; `read` is the clock of the rank that stamps. Time moves when requests come."""

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self.read = read
        self._latest_s = 0.0
        self._warned = False

    def now(self) -> float:
        return self._latest_s

    def receive(self, received: list[Any]) -> list[Any]:
        """Take the stamps out of what a rank received and go by the latest; the rest is returned.

        Requests without a stamp mean that time stands still, and that nothing ages any more: said once, loudly.
        """
        rest = [item for item in received if not isinstance(item, Stamp)]
        if len(rest) < len(received):
            self._latest_s = max(self._latest_s, *(item.seconds for item in received if isinstance(item, Stamp)))
        elif not self._warned and any(map(is_request, rest)):
            self._warned = True
            logger.error(
                "requests reached this rank without the time: the cache cannot tell old entries from new ones and "
                "evicts badly; run without tensor or pipeline parallelism, or use --hybrid-policy lru"
            )
        return rest


_clock: RankClock | None = None
"""The clock of this process's cache, if its server has several ranks."""


def share(clock: RankClock) -> RankClock:
    """Let the hooks serve `clock`."""
    global _clock
    _clock = clock
    return clock


def shared() -> RankClock | None:
    """The clock of several ranks; None where there is one rank, whose own clock does."""
    return _clock


def stamp(received: list[Any] | None, *_: Any) -> None:
    """A rank took requests in. What came through an earlier pipeline stage has its stamp already."""
    if _clock is not None and received and not any(isinstance(item, Stamp) for item in received):
        received.append(Stamp(_clock.read()))


def keep_with_work(split: tuple[list[Any], list[Any]], *_: Any) -> tuple[list[Any], list[Any]]:
    """With data-parallel attention, requests stay within their group of ranks: so do their stamps."""
    work, control = split
    stamps = [item for item in control if isinstance(item, Stamp)]
    return [*work, *stamps], [item for item in control if not isinstance(item, Stamp)]


def take_stamps(scheduler: Any, received: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A scheduler is about to handle what it received."""
    return None if _clock is None or not received else ((scheduler, _clock.receive(received)), {})


def is_request(item: Any) -> bool:
    """Whether a message to the scheduler is a request, or a batch of them."""
    return hasattr(item, "input_ids") or hasattr(item, "batch")
