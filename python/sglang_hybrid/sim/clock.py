"""Seconds that pass for a cache: the caller's clock, made monotonic, with a pace of its own where it stands still.

Recency and hazards need time to pass. A trace whose requests all carry one time stamp, or a clock that was set back,
would freeze it: after `PATIENCE` requests without progress each further request takes the mean gap of the requests so
far, or `UNPACED_S` where no time has ever passed. A clock that was set back counts on from there. One that ticks, with
many requests at every tick, is waited for: for twice as many as it has held before without progress.
"""

import math

from sglang_hybrid.core.errors import ConfigError

PATIENCE = 8
UNPACED_S = 1.0


class Elapsed:
    """A monotonic clock over the caller's; `now` is the latest time it gave."""

    def __init__(self) -> None:
        self.now = -math.inf
        self._last_request = -math.inf
        self._latest = -math.inf  # what the caller's clock showed last, before anybody set it back
        self._offset_s = 0.0
        self._still = 0  # requests without progress
        self._patience = PATIENCE
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
                self._paced_s += self.now - self._last_request
            self._patience = max(self._patience, 2 * self._still)
            self._still = 0
        else:
            self._still += 1
        set_back = now < self._latest
        if self._still < (PATIENCE if set_back else self._patience):
            self._paced_requests += 1
        else:
            self.now += self._paced_s / self._paced_requests or UNPACED_S
            if set_back:
                self._offset_s, self._latest = self.now - now, now
        self._latest = max(self._latest, now)
        self._last_request = self.now
        return self.now
