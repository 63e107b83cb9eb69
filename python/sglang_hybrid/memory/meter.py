"""A backing that counts: calls, granules and how long they took."""

from collections import deque
from collections.abc import Callable, Sequence

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.memory.backing import Backing, Run, count_granules

_RECENT = 1024


class Meter:
    """Calls of one kind; `seconds` holds the latest durations."""

    def __init__(self) -> None:
        self.calls = 0
        self.granules = 0
        self.failed = 0
        self.total_s = 0.0
        self.seconds: deque[float] = deque(maxlen=_RECENT)

    def quantile(self, share: float) -> float:
        """The duration that `share` of the latest calls did not exceed, 0 without calls."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class MeteredBacking:
    """A Backing (see memory.backing) around another; `clock` gives seconds."""

    def __init__(self, backing: Backing, clock: Callable[[], float]) -> None:
        self.backing = backing
        self.mapped = Meter()
        self.unmapped = Meter()
        self._clock = clock

    def map(self, runs: Sequence[Run]) -> None:
        """See Backing."""
        self._timed(self.mapped, self.backing.map, runs)

    def unmap(self, runs: Sequence[Run]) -> None:
        """See Backing."""
        self._timed(self.unmapped, self.backing.unmap, runs)

    def trim(self, keep: int) -> int:
        """See Backing."""
        return self.backing.trim(keep)

    def _timed(self, meter: Meter, call: Callable[[Sequence[Run]], None], runs: Sequence[Run]) -> None:
        start = self._clock()
        try:
            call(runs)
        except PoolExhausted:
            meter.failed += 1
            raise
        seconds = self._clock() - start
        meter.calls += 1
        meter.granules += count_granules(runs)
        meter.total_s += seconds
        meter.seconds.append(seconds)
