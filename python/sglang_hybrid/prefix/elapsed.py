"""Seconds that pass for a cache: the caller's clock, made monotonic, with a pace of its own where it stands still.

Recency and hazards need time to pass. A clock that jumped back, or a trace whose requests all carry one time stamp,
would freeze it: after `PATIENCE` requests without progress each further request takes the mean gap of the requests so
far, or `UNPACED_S` where no time has ever passed, and the clock counts on from there.
"""

import math

from sglang_hybrid.core.errors import ConfigError

PATIENCE = 8
UNPACED_S = 1.0


class Elapsed:
    """A monotonic clock over the caller's; `now` is the latest time it gave.

    `is_counter` holds as long as all requests were the same time apart (or at one time): such a clock orders requests
    and tells nothing about waiting.
    """

    def __init__(self) -> None:
        self.now = -math.inf
        self._last_request = -math.inf
        self._offset_s = 0.0
        self._still = 0
        self._step_s: float | None = None  # the only progress ever made between two requests; None before the second
        self.is_counter = True
        self._paced_s = 0.0  # time that passed, over
        self._paced_requests = 0  # this many requests

    def look(self, now: float) -> float:
        """The present time, no request having come; raises ConfigError for a time that is not finite."""
        if not math.isfinite(now):
            raise ConfigError(f"time is a finite number of seconds: {now}")
        now += self._offset_s
        if now > self.now:
            self.now = now
        return self.now

    def request(self, now: float) -> float:
        """The time of a request that came at `now`."""
        self.look(now)
        if self.now > self._last_request:
            if self._paced_requests:
                step_s = self.now - self._last_request
                self._paced_s += step_s
                self._step_s = step_s if self._step_s is None else self._step_s
                self.is_counter = self.is_counter and abs(step_s - self._step_s) <= 1e-6 * self._step_s
            self._still = 0
        else:
            self._still += 1
        if self._still < PATIENCE:
            self._paced_requests += 1
        else:
            self.now += self._paced_s / self._paced_requests or UNPACED_S
            self._offset_s = self.now - now
        self._last_request = self.now
        return self.now
