"""A budget in which a pool may use only so much: a static split is two limits, AVMP moves them, on-demand has none."""

from collections.abc import Mapping

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.memory.backing import Backing
from sglang_hybrid.memory.budget import Budget, ReturnConfig
from sglang_hybrid.memory.layout import Layout
from sglang_hybrid.memory.pool import Pool


def page_bytes(layout: Layout) -> int:
    """Bytes of one page over all planes."""
    return layout.page_slots * sum(planes.count * planes.slot_bytes for planes in layout.planes)


class LimitedBudget(Budget):
    """`limits` caps the used granules of a pool by name; a pool without one may use the whole budget."""

    def __init__(
        self,
        total_bytes: int,
        granule_bytes: int,
        backing: Backing,
        limits: Mapping[str, int] | None = None,
        returns: ReturnConfig | None = None,
    ) -> None:
        super().__init__(total_bytes, granule_bytes, backing, returns)
        self.limits = dict(limits or {})
        self.refused: str | None = None  # the pool whose limit stopped the last refused request

    def affords(self, pool: Pool, granules: int) -> bool:
        """See Budget."""
        return super().affords(pool, granules) and granules <= self._left(pool)

    def obtainable(self, pool: Pool) -> int:
        """See Budget."""
        columns = self._left(pool) // pool.layout.column_granules
        return min(super().obtainable(pool), pool.room + columns * pool.layout.column_pages)

    def check(self) -> None:
        """See Budget; no pool exceeds its limit."""
        super().check()
        for name, limit in self.limits.items():
            if self._left(self.pools[name]) < 0:
                used = self.pools[name].columns.used_granules
                raise InvariantError(f"pool {name!r} exceeds its limit {limit}: {used}")

    def _left(self, pool: Pool) -> int:
        """Granules that `pool` may still use, by the columns as they stand."""
        return self.limits.get(pool.name, self.total) - pool.columns.used_granules
