"""What running requests hold and what they were promised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from avmp.demand import Growth

Pages = NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


@dataclass
class Lease:
    """What a running request holds (`pages`) and what it may still take (`promised`, at first `later`), by pool.

    `spare` are pages taken ahead in pools whose columns share granules, where a promise could not be priced exactly.
    `pending` are pages about to be taken. `uses` are the keys of the entries it reads; `step` is when it was admitted.
    """

    request_id: int
    step: int = 0
    uses: tuple[int, ...] = ()
    growth: Growth | None = None
    later: dict[str, int] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)
    pages: dict[str, Pages] = field(default_factory=dict)
    spare: dict[str, Pages] = field(default_factory=dict)
    pending: Mapping[str, int] = field(default_factory=dict)

    def holds(self, pool: str) -> int:
        """Pages of `pool` this request has or is about to have."""
        return len(self.pages[pool]) + len(self.spare[pool]) + self.pending.get(pool, 0)

    def due(self, pool: str, step: int) -> int:
        """Promised pages of `pool` it may take by `step` without getting ahead of its growth."""
        growth = self.growth
        if growth is None:
            return self.promised[pool]
        since = step - self.step - growth.first
        scheduled = 0 if since < 0 else (since // growth.every + 1) * growth.at_once
        return min(self.promised[pool], max(0, scheduled - (self.later[pool] - self.promised[pool])))


def outstanding(leases: Sequence[Lease], pools: Sequence[str], step: int) -> dict[str, int]:
    """Pages of each pool that must remain obtainable for `leases` to end.

    Requests without a growth bound count in full. For the others it is the highest point of what they will have taken
    less what those before them will have given back: under lockstep decoding they need not all peak at once.
    """
    timed = [lease for lease in leases if lease.growth is not None and step < lease.step + lease.growth.end]
    late = [lease for lease in leases if lease.growth is None or step >= lease.step + lease.growth.end]
    return {name: sum(lease.promised[name] for lease in late) + _peak(timed, name, step) for name in pools}


def _peak(leases: Sequence[Lease], pool: str, step: int) -> int:
    if not any(lease.promised[pool] for lease in leases):
        return 0
    rows = []
    for lease in leases:
        growth = lease.growth
        assert growth is not None
        start, end = lease.step + growth.first, lease.step + growth.end
        taken = lease.later[pool] - lease.promised[pool]
        rows.append((start, growth.every, growth.at_once, end, taken, lease.promised[pool], lease.holds(pool)))
    start, every, at_once, end, taken, promised, held = np.array(rows, dtype=np.int64).T
    at = np.unique(end)[:, None] - 1  # between two ends usage only rises: it peaks just before an end
    scheduled = np.maximum((at - start) // every + 1, 0) * at_once
    more = np.clip(scheduled - taken, 0, promised)
    return max(0, int(np.where(end > at, more, -held).sum(axis=1).max()))


def union(*needs: Mapping[str, int]) -> dict[str, int]:
    """Sum of page counts by pool."""
    return {name: sum(need.get(name, 0) for need in needs) for name in {name for need in needs for name in need}}
