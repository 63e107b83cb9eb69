"""Time as a parameter: no decision of this package reads a wall clock by itself."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes backwards."""

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        ...


class MonotonicClock:
    """The machine's monotonic clock, for serving."""

    def now(self) -> float:
        return time.monotonic()


class LogicalClock:
    """A clock moved by hand, for simulation and tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> float:
        """Move the clock forward by `by_s` >= 0 seconds and return the new time; raises ValueError otherwise."""
        if by_s < 0:
            raise ValueError(f"a clock cannot go backwards: {by_s}")
        self._now_s += by_s
        return self._now_s
