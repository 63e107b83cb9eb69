"""An index for scores of the form `rates[class, age bin] * density`, where the age changes by itself.

Every entry is a row of one table. A victim has the lowest score of a sample of the rows, scored when asked for: with up
to `SAMPLE` entries of all of them, so that it is the exact argmin, beyond that of every n-th row from a random start.
Sampled eviction is what LHD (Beckmann et al. 2018), hyperbolic caching (Blankstein et al. 2017) and Redis do;
benchmarks/sim/index_ablation.py measures what it costs here, in time and in hit rate.

The start is drawn from a seeded generator, so that equal calls find equal victims: tensor-parallel ranks and replays of
a request log depend on that.
"""

import random

import numpy as np

from sglang_hybrid.core.arrays import FloatArray, IntArray
from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.prefix.reuse.table import BINS, EDGES_S, flat

SAMPLE = 1024
_FIRST_ROWS = 64


class SampledIndex:
    """The index described above over opaque integer ids; `rates` is a live array of shape [classes, BINS], in 1/s."""

    def __init__(self, rates: FloatArray, sample: int = SAMPLE, seed: int = 0) -> None:
        if sample < 1:
            raise ConfigError(f"a victim needs a sample of one candidate or more: {sample}")
        self._rates = rates.reshape(-1)
        if not np.shares_memory(self._rates, rates):
            raise InvariantError(f"rates are read as they change and must be contiguous: shape {rates.shape}")
        self._sample = sample
        self._random = random.Random(seed)
        self._latest_s = 0.0
        self._ids: list[int] = []
        self._rows: dict[int, int] = {}
        # The table: by row, of which the first len(self._ids) are in use. A class counts as class * BINS - 1, because
        # bins are found from 1 on. Single elements are written through memoryviews, which cost a third.
        self._classes: IntArray = np.zeros(0, dtype=np.int64)
        self._last_s: FloatArray = np.zeros(0)
        self._densities: FloatArray = np.zeros(0)
        self._resize(_FIRST_ROWS)

    def _resize(self, rows: int) -> None:
        self._classes, self._last_s = np.resize(self._classes, rows), np.resize(self._last_s, rows)
        self._densities = np.resize(self._densities, rows)
        self._class, self._last, self._density = self._classes.data, flat(self._last_s), flat(self._densities)

    def put(self, entry_id: int, reuse_class: int, last_s: float, density: float) -> None:
        """Add an entry or replace its class, last use (seconds) and density (> 0)."""
        row = self._rows.get(entry_id, -1)
        if row < 0:
            row = self._rows[entry_id] = len(self._ids)
            self._ids.append(entry_id)
            if row == self._densities.size:
                self._resize(2 * row)
        self._class[row] = reuse_class * BINS - 1
        self._last[row] = last_s
        self._density[row] = density
        if last_s > self._latest_s:
            self._latest_s = last_s

    def discard(self, entry_id: int) -> None:
        """Forget an entry; unknown ids are ignored."""
        row = self._rows.pop(entry_id, -1)
        if row < 0:
            return
        moved = self._ids.pop()
        if moved == entry_id:
            return
        last = len(self._ids)
        self._ids[row], self._rows[moved] = moved, row
        self._class[row], self._last[row] = self._class[last], self._last[last]
        self._density[row] = self._density[last]

    def pop(self, now: float) -> int | None:
        """Remove and return the id with the lowest score of the sample, None when empty.

        Time that runs backwards is taken as the latest last use.
        """
        size = len(self._ids)
        if not size:
            return None
        step = -(-size // self._sample)
        start = int(self._random.random() * step) if step > 1 else 0
        rows = slice(start, size, step)
        buckets = EDGES_S.searchsorted(max(now, self._latest_s) - self._last_s[rows], "right")
        buckets += self._classes[rows]
        scores = self._rates[buckets]
        scores *= self._densities[rows]
        victim = self._ids[start + step * int(scores.argmin())]
        self.discard(victim)
        return victim

    def __len__(self) -> int:
        return len(self._ids)

    def check(self) -> None:
        """Raise InvariantError where an id and its row do not belong together."""
        if len(self._rows) != len(self._ids) or any(self._rows.get(i) != row for row, i in enumerate(self._ids)):
            raise InvariantError(f"every entry has a row of its own: {len(self._ids)} rows, {len(self._rows)} ids")
