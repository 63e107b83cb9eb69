"""The memory of one scheduler process: the budget, its backing, and a supply of pages for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from sglang_hybrid.core.errors import ConfigError, HybridError, InvariantError
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.driver import Driver
from sglang_hybrid.device.prefault import Prefaulter
from sglang_hybrid.engine.pools.copies import Begin, begin_on
from sglang_hybrid.engine.pools.ranks import Ranks
from sglang_hybrid.engine.pools.supply import Supply
from sglang_hybrid.memory.budget import Budget, ReturnConfig
from sglang_hybrid.memory.layout import Layout
from sglang_hybrid.memory.meter import Meter, MeteredBacking
from sglang_hybrid.memory.outlook import Outlook
from sglang_hybrid.memory.sizing import Sizing

_RETURN_BAND = 64  # a 64th of the budget may stay idle without being given back
_AHEAD, _AHEAD_BYTES = 8, 256 << 20  # an eighth of the budget is created ahead of need, at most this much
_BATCH = 32  # granules given back at a time: about a millisecond during which a request would wait
_QUIET_S = 0.5


class Arena:
    """Everything is mapped on demand and counted in granules. `clock` gives seconds.

    With `ranks` nothing that differs between them (time, what is mapped, who asked) has a say in which pages are had.
    """

    def __init__(
        self,
        sizing: Sizing,
        driver: Driver,
        device: torch.device,
        idle_s: float,
        clock: Callable[[], float],
        processor_clock: Callable[[], float] | None = None,
        ranks: Ranks | None = None,
        begin_copy: Begin | None = None,
    ) -> None:
        self.ranks = ranks
        self.passes = 0  # and steps of decoding, the same on every rank
        self._begin_copy = begin_copy or begin_on(device)
        self.sizing = sizing
        self.device = device
        self.idle_s = idle_s
        self.clock = clock
        self.pooled = PooledBacking(driver, [], sizing.granule_bytes, sizing.total)
        self.backing = MeteredBacking(self.pooled, clock, processor_clock)
        self.grown = Meter(clock, processor_clock)  # what a request waits for when a column comes into use
        self.prefaulter: Prefaulter | None = None
        returns = ReturnConfig(idle=idle_s, band=sizing.total // _RETURN_BAND)
        self.budget = Budget(sizing.total_bytes, sizing.granule_bytes, self.backing, returns=returns)
        self.supplies: dict[str, Supply] = {}
        self.most_used = 0
        self.most_mapped = 0
        self.settled_s = self.used_s = clock()
        self._checked_s = -1.0

    def start_prefault(self) -> None:
        """From now on a thread creates physical memory before it is needed; see Prefaulter."""
        self.prefaulter = Prefaulter(self.pooled, *_ahead(self.sizing))
        self.prefaulter.start()

    def open(self, layout: Layout) -> tuple[Supply, int]:
        """Reserve the addresses of one more pool: its supply, and the number of its first plane."""
        if not layout.exclusive:
            raise InvariantError(f"columns of pool {layout.name!r} share granules: {layout}")
        first_plane = self.pooled.add_planes(layout.plane_granules)
        pool = self.budget.add_pool(layout, first_plane, by_index=self.ranks is not None)
        supply = Supply(
            self.budget, pool, self.device, self.tidy, self.grown, self.ranks, self._begin_copy, lambda: self.passes
        )
        self.supplies[layout.name] = supply
        return supply, first_plane

    def tidy(self, wait: bool = False) -> None:
        """Make the books exact: what SGLang freed since the last question is free memory now, as far as that is known.

        With `wait`, all of it.
        """
        if self.ranks is not None or wait or any(supply.untidy for supply in self.supplies.values()):
            self.sort(wait)

    def sort(self, wait: bool = False) -> None:
        """Put every free page on the books of its column, and note the high-water marks before."""
        self.most_used = max(self.most_used, self.budget.used)
        self.most_mapped = max(self.most_mapped, self.budget.mapped)
        now = self.clock()
        for supply in self.supplies.values():
            supply.pool.now = now
            if wait:
                supply.drain(wait)
            supply.pool.sort()

    def shortfall(self, pages: Mapping[str, int]) -> int | None:
        """Granules that are missing before each supply could hold `pages`; None if it has no addresses for them."""
        self.tidy()
        short = self._shortfall(pages)
        if short or (short is None and any(supply.waiting for supply in self.supplies.values())):
            self.sort(wait=True)  # a page given back after it was held may be all that keeps its column in use
            short = self._shortfall(pages)
        return short

    def _shortfall(self, pages: Mapping[str, int]) -> int | None:
        """The same by the columns as they stand."""
        wanted = 0
        for name, supply in self.supplies.items():
            wanted_columns = self._columns_for(name, pages)
            columns = supply.pool.columns
            if wanted_columns > len(columns.state) - columns.live_columns:
                return None
            wanted += columns.used_granules + wanted_columns * columns.column_granules
        return max(0, wanted - self.budget.total)

    def crowded(self, pages: Mapping[str, int]) -> str:
        """The kind that has no addresses for its `pages` until some of its own are freed."""
        for name, supply in self.supplies.items():
            columns = supply.pool.columns
            if self._columns_for(name, pages) > len(columns.state) - columns.live_columns:
                return name
        raise InvariantError(f"every kind has addresses for its pages: {dict(pages)}")

    def _columns_for(self, name: str, pages: Mapping[str, int]) -> int:
        """Columns of a kind that must come into use before it could hold its `pages`."""
        supply = self.supplies[name]
        return supply.pool.columns_for(max(0, pages.get(name, 0) - len(supply.held)))

    def possible(self, pages: Mapping[str, int], gone: Mapping[str, Iterable[tuple[int, int]]]) -> bool:
        """Whether the supplies could hold `pages` if so many pages were evicted of each kind, by (column, how many)."""
        self.tidy()
        outlook = Outlook(self.budget)
        for name, by_column in gone.items():
            outlook.without(name, by_column)
        lacking = {
            name: max(0, count - len(self.supplies[name].held))
            for name, count in pages.items()
            if name in self.supplies
        }
        return outlook.fits(lacking)

    def reserve(self, pages: Mapping[str, int]) -> bool:
        """Hold `pages` of every kind, mapped, or none beyond what was held."""
        before = {name: len(self.supplies[name].held) for name in pages}
        if all(self.supplies[name].reserve(count) for name, count in pages.items()):
            return True
        for name, count in before.items():
            self.supplies[name].release_held(count)
        return False

    def release_held(self) -> None:
        """Hold nothing."""
        for supply in self.supplies.values():
            supply.release_held()

    def used(self) -> None:
        """Somebody works: a pass or step begins, and memory created ahead stays."""
        self.passes += 1
        self.used_s = self.clock()

    def settle(self) -> bool:
        """Give memory back that was unused for a while (Budget.settle), a batch of it; whether more is to be given."""
        self.settled_s = now = self.clock()
        if self.ranks is None:
            self.release_held()  # otherwise at the begin of a pass: ranks settle at different times
        self.sort()
        given = self.budget.settle(now, _BATCH)
        keep = 0 if self.prefaulter is None or now - self.used_s >= self.idle_s else self.prefaulter.pooled
        self.backing.trim(max(keep, self.pooled.at_hand - _BATCH))
        return given >= _BATCH or self.pooled.at_hand > keep

    def release(self) -> int:
        """Give every granule without a live page back to the system now; how many."""
        self.release_held()
        self.sort(wait=True)
        for pool in self.budget.pools.values():
            for column in list(pool.columns.warm_since):
                self.budget.release(pool, column)
        return self.backing.trim(0)

    def check_when_quiet(self) -> None:
        """`check`, once after each use, when nobody has come for a while: it takes milliseconds on a large budget."""
        if self._checked_s < max(self.used_s, self.settled_s) and self.clock() - self.used_s >= _QUIET_S:
            self.check()
            self._checked_s = self.clock()

    def violations(self) -> list[str]:
        """What `check_when_quiet` finds wrong, in words."""
        try:
            self.check_when_quiet()
        except HybridError as error:
            return [str(error)]
        return []

    def check(self) -> None:
        """Raise InvariantError unless budget, pools and backing tell one story."""
        self.sort()
        self.budget.check()
        self.pooled.check()
        if self.pooled.mapped_bytes != self.budget.mapped * self.sizing.granule_bytes:
            raise InvariantError(f"the backing maps other granules than the books: {self.pooled.mapped_bytes}")


def _ahead(sizing: Sizing) -> tuple[int, int]:
    """Granules that are created ahead of need, and those below which more are: one more column of each kind."""
    columns = sizing.kv_column_granules + sizing.state_column_granules
    return max(columns, min(sizing.total // _AHEAD, _AHEAD_BYTES // sizing.granule_bytes)), columns


_arena: Arena | None = None


def current() -> Arena:
    """The arena of this process."""
    if _arena is None:
        raise InvariantError("elastic pools are built before their sizes are known: no arena")
    return _arena


def exists() -> bool:
    """Whether this process has elastic pools."""
    return _arena is not None


def create(arena: Arena) -> Arena:
    """Make `arena` the one of this process; there is one scheduler in a process, hence one budget."""
    global _arena
    if _arena is not None:
        raise ConfigError("a process has one elastic budget; use --hybrid-memory static for two models in one: 2")
    _arena = arena
    return arena
