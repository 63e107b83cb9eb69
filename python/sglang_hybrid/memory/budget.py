"""One byte budget of granules for all pools: who gets memory, who gives it back, and an account that always adds up.

used      granules under a column with a live page
free      mapped granules without one: the next allocation of their pool costs no driver call, any other pool takes them
unmapped  the rest
used + free + unmapped == total, after every call. A loose page (see Pool) counts as live until somebody sorts.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.memory.backing import Backing, Run, count_granules
from sglang_hybrid.memory.columns import LIVE, UNMAPPED, WARM
from sglang_hybrid.memory.layout import Layout
from sglang_hybrid.memory.pool import Pool


@dataclass(frozen=True)
class ReturnConfig:
    """When idle memory goes back to the system.

    A column is idle once it has been WARM for `idle`, in the caller's unit of time. Returning starts when more than
    `band` granules are idle and stops when none is: the band is the hysteresis.
    """

    idle: float = 1000.0
    band: int = 0

    def __post_init__(self) -> None:
        if self.idle < 0 or self.band < 0:
            raise ConfigError(f"idle and band must not be negative: {self.idle}, {self.band}")


class Budget:
    """The granules of one machine and the pools that share them. A granule belongs to whoever uses it: no split."""

    def __init__(
        self,
        total_bytes: int,
        granule_bytes: int,
        backing: Backing,
        returns: ReturnConfig | None = None,
    ) -> None:
        if granule_bytes < 1 or total_bytes < granule_bytes:
            raise ConfigError(f"the budget must hold at least one granule of {granule_bytes} bytes: {total_bytes}")
        self.total = total_bytes // granule_bytes
        self.limit = self.total  # granules that may be in use; fewer in `Holdings.closed`
        self.granule_bytes = granule_bytes
        self.backing = backing
        self.returns = returns or ReturnConfig()
        self.pools: dict[str, Pool] = {}
        self._returning = False  # whether the last `settle` stopped before all that was idle had gone
        self.transfers = 0  # granules that one pool gave up for another

    def add_pool(self, layout: Layout, first_plane: int = 0, by_index: bool = False) -> Pool:
        """A pool of this budget, its pinned pages taken; `first_plane` is the number of its first plane in the backing.

        Raises ConfigError if the name is taken, the granules differ or the budget cannot hold the pinned pages.
        """
        name = layout.name
        if name in self.pools:
            raise ConfigError(f"give every pool its own name: {name!r}")
        if layout.granule_bytes != self.granule_bytes:
            raise ConfigError(f"pool {name!r} must use granules of {self.granule_bytes} bytes: {layout}")
        pool = Pool(layout, lambda count: self.activate(pool, count), first_plane, by_index)
        self.pools[name] = pool
        try:
            pool.pin()
        except PoolExhausted as error:
            del self.pools[name]
            raise ConfigError(f"raise the budget: it cannot hold the pinned pages of {name!r}: {error}") from error
        return pool

    def sort(self) -> None:
        """Sort every pool: from then on only live pages keep granules in use."""
        for pool in self.pools.values():
            pool.sort()

    @property
    def used(self) -> int:
        """Granules under live pages, loose ones included."""
        return sum(pool.columns.used_granules for pool in self.pools.values())

    @property
    def mapped(self) -> int:
        """Granules with physical memory behind them."""
        return sum(pool.columns.mapped_granules for pool in self.pools.values())

    @property
    def free(self) -> int:
        """Mapped granules without a live page."""
        return self.mapped - self.used

    @property
    def unmapped(self) -> int:
        """Granules of the budget that no pool has mapped."""
        return self.total - self.mapped

    def activate(self, pool: Pool, count: int) -> list[int]:
        """Make `count` more columns of `pool` LIVE and return them; all or nothing.

        Takes WARM columns of the pool first, then unmapped granules, then WARM columns of the other pools, oldest
        first. Raises PoolExhausted, with nothing changed that a caller could see, when live pages hold the rest of
        the budget.
        """
        self.sort()
        columns = pool.columns.candidates(count)
        if len(columns) < count:
            raise PoolExhausted(f"pool {pool.name!r} has no more addresses; raise its slots: {pool.layout.slots}")
        cost = pool.columns.cost(columns)
        if not self.affords(pool, cost):
            raise PoolExhausted(
                f"pool {pool.name!r} needs {cost} granules; evict or wait: {self.limit - self.used} left"
            )
        if not pool.columns.all_warm(columns):
            self._back(pool, columns)
        pool.columns.move(columns, LIVE)
        return columns

    def _back(self, pool: Pool, columns: Sequence[int]) -> None:
        """Put memory under `columns`: new memory up to the budget, and where the machine has none, idle memory."""
        refused = None
        if self.limit == self.total:
            try:
                return self._map(self._make_room(pool, columns, self.total))
            except PoolExhausted as error:
                refused = error
        try:
            self._map(self._make_room(pool, columns, self.mapped))
        except PoolExhausted as error:
            raise refused or error from None

    def affords(self, pool: Pool, granules: int) -> bool:
        """Whether `pool` may use `granules` more, counting free and unmapped memory alike."""
        return self.used + granules <= self.limit

    def obtainable(self, pool: Pool) -> int:
        """Pages that `pool` could hand out now, at least: a capacity question that sorts nothing and moves nothing.

        Loose pages of other pools count as in use, so after `sort` the answer may be higher.
        """
        addressed = len(pool.columns.state) - pool.columns.live_columns
        columns = min((self.limit - self.used) // pool.columns.column_granules, addressed)
        return pool.room + columns * pool.layout.column_pages

    def release(self, pool: Pool, *columns: int) -> int:
        """Unmap WARM columns; the granules freed. A LIVE one raises InvariantError before any driver call."""
        pool.sort()
        states = pool.columns.state
        for column in columns:
            if states[column] != WARM:
                live = states[column] == LIVE
                raise InvariantError(
                    f"free its pages first; column {column} of {pool.name!r} is {'live' if live else 'unmapped'}"
                )
        if not pool.columns.exclusive and len(columns) > 1:
            return sum(self.release(pool, column) for column in columns)
        runs = [run for column in columns for run in pool.columns.releasable(column)]
        if runs:
            self.backing.unmap(runs)
        pool.columns.move(columns, UNMAPPED)
        return count_granules(runs)

    def settle(self, now: float, most: int | None = None) -> int:
        """Return idle memory as `returns` says, about `most` granules of it at a time; give the granules unmapped.

        Once returning has begun it goes on, call by call, whatever `band` says, until nothing is idle.
        """
        self.sort()
        pools = list(self.pools.values())
        idle = [
            (since, order, column)
            for order, pool in enumerate(pools)
            for column, since in pool.columns.warm_since.items()
            if since <= now - self.returns.idle
        ]
        idle_granules = sum(pools[order].columns.column_granules for _, order, _ in idle)
        if idle_granules <= (0 if self._returning else self.returns.band):
            self._returning = False
            return 0
        given = 0
        self._returning = False
        for _, order, column in sorted(idle):
            if most is not None and given >= most:
                self._returning = True
                break
            given += self.release(pools[order], column)
        return given

    def check(self) -> None:
        """Raise InvariantError unless every pool is consistent and free + used + unmapped == total."""
        for pool in self.pools.values():
            pool.check()
        if min(self.free, self.used, self.unmapped) < 0 or self.free + self.used + self.unmapped != self.total:
            raise InvariantError(
                f"the account does not add up to {self.total}: {(self.free, self.used, self.unmapped)}"
            )

    def _map(self, missing: Sequence[Run]) -> None:
        if missing:
            self.backing.map(missing)

    def _oldest_warm(self) -> Iterator[tuple[int, int]]:
        """(order of the pool, column) of WARM columns by time stamp; equal ones pool by pool, as they ran empty."""

        def ages(order: int, pool: Pool) -> Iterator[tuple[float, int, int]]:
            return ((since, order, column) for column, since in pool.columns.warm_since.items())

        each = [ages(order, pool) for order, pool in enumerate(self.pools.values())]
        return ((order, column) for _, order, column in heapq.merge(*each, key=lambda age: age[:2]))

    def _make_room(self, pool: Pool, columns: Sequence[int], most: int) -> list[Run]:
        """Unmap other WARM columns, oldest first, until `most` granules hold what `columns` lack; the runs they lack.

        Raises PoolExhausted where that is impossible, which it is not where `most` is the whole budget.
        """
        missing = pool.columns.missing(columns)
        if count_granules(missing) <= most - self.mapped:
            return missing
        pools = list(self.pools.values())
        chosen = set(columns)
        while True:
            short, batch = count_granules(missing) - (most - self.mapped), 0
            if short <= 0:
                return missing
            going: dict[int, list[int]] = {}
            for order, column in self._oldest_warm():
                if batch >= short:  # by the most that columns can free: never more than is needed
                    break
                if pools[order] is not pool or column not in chosen:
                    going.setdefault(order, []).append(column)
                    batch += pools[order].columns.column_granules
            if not going:
                break
            for order, leaving in going.items():
                given = self.release(pools[order], *leaving)
                self.transfers += given if pools[order] is not pool else 0
            missing = pool.columns.missing(columns)
        if most < self.total:
            raise PoolExhausted(
                f"the machine has no more memory for pool {pool.name!r}; evict or wait: {most} granules"
            )
        raise InvariantError(f"affordable granules cannot be found: {self.free} free, {self.unmapped} unmapped")
