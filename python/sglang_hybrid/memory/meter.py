"""A backing that counts: calls, granules and how long they took."""

from collections import deque
from collections.abc import Callable, Sequence

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.memory.backing import Backing, Run, count_granules

_RECENT = 1024

Clock = Callable[[], float]


class Meter:
    """Calls of one kind. `clock` gives seconds as the caller waits for them, `processor_clock` those of its thread:
    on a machine that others use the first holds their turns too. The latest durations are in `seconds` and
    `processor_s`.
    """

    def __init__(self, clock: Clock, processor_clock: Clock | None = None) -> None:
        self.calls = 0
        self.granules = 0
        self.failed = 0
        self.total_s = 0.0
        self.seconds: deque[float] = deque(maxlen=_RECENT)
        self.processor_s: deque[float] = deque(maxlen=_RECENT)
        self._clock = clock
        self._processor_clock = processor_clock or clock

    def timed(self, call: Callable[[], None], granules: int = 0) -> None:
        """Run `call`; one that raises PoolExhausted counts as failed and is not timed."""
        start, processor_start = self._clock(), self._processor_clock()
        try:
            call()
        except PoolExhausted:
            self.failed += 1
            raise
        self.processor_s.append(self._processor_clock() - processor_start)
        self.seconds.append(self._clock() - start)
        self.calls += 1
        self.granules += granules
        self.total_s += self.seconds[-1]

    def quantile(self, share: float) -> float:
        """The duration that `share` of the latest calls did not exceed, 0 without calls."""
        return _quantile(self.seconds, share)

    def processor_quantile(self, share: float) -> float:
        """The same of the time that the calls computed."""
        return _quantile(self.processor_s, share)


class MeteredBacking:
    """A Backing (see memory.backing) around another; clocks as in Meter."""

    def __init__(self, backing: Backing, clock: Clock, processor_clock: Clock | None) -> None:
        self.backing = backing
        self.mapped = Meter(clock, processor_clock)
        self.unmapped = Meter(clock, processor_clock)

    def map(self, runs: Sequence[Run]) -> None:
        """See Backing."""
        self.mapped.timed(lambda: self.backing.map(runs), count_granules(runs))

    def unmap(self, runs: Sequence[Run]) -> None:
        """See Backing."""
        self.unmapped.timed(lambda: self.backing.unmap(runs), count_granules(runs))

    def trim(self, keep: int) -> int:
        """See Backing."""
        return self.backing.trim(keep)


def _quantile(values: deque[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
