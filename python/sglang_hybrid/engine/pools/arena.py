"""The memory of one scheduler process: the budget, its backing, and a supply of pages for each kind."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.core.errors import ConfigError, HybridError, InvariantError
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.driver import Driver
from sglang_hybrid.device.prefault import Prefaulter
from sglang_hybrid.engine.pools.copies import Begin, begin_on
from sglang_hybrid.engine.pools.supply import Supply
from sglang_hybrid.memory.budget import Budget, ReturnConfig
from sglang_hybrid.memory.holdings import Holdings
from sglang_hybrid.memory.layout import Layout
from sglang_hybrid.memory.meter import Meter, MeteredBacking
from sglang_hybrid.memory.sizing import Sizing
from sglang_hybrid.memory.supply import Agreement

_RETURN_BAND = 64  # a 64th of the budget may stay idle without being given back
_AHEAD, _AHEAD_BYTES = 8, 256 << 20  # an eighth of the budget is created ahead of need, at most this much
_BATCH = 32  # granules given back at a time: about a millisecond during which a request would wait
_QUIET_S = 0.5


class Arena(Holdings):
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
        ranks: Agreement | None = None,
        begin_copy: Begin | None = None,
    ) -> None:
        self.passes = 0  # and steps of decoding, the same on every rank
        self._begin_copy = begin_copy or begin_on(device)
        self.device = device
        self.idle_s = idle_s
        self.pooled = PooledBacking(driver, [], sizing.granule_bytes, sizing.total)
        self.backing = MeteredBacking(self.pooled, clock, processor_clock)
        self.grown = Meter(clock, processor_clock)  # what a request waits for when a column comes into use
        self.prefaulter: Prefaulter | None = None
        returns = ReturnConfig(idle=idle_s, band=sizing.total // _RETURN_BAND)
        super().__init__(
            sizing, Budget(sizing.total_bytes, sizing.granule_bytes, self.backing, returns=returns), clock, ranks
        )
        self.settled_s = self.used_s = clock()
        self._checked_s = -1.0
        self.kv_planes_left = sizing.kinds.kv_planes  # that no pool has yet
        self._kv: tuple[Supply, int] | None = None

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

    def take_kv_planes(self, count: int) -> tuple[Supply, int, int]:
        """The next `count` planes of KV, for one of the models whose KV lies in the same pages.

        Returns the supply of all of them, the number of its first plane, and how many planes others took before.
        """
        if self._kv is None:
            self._kv = self.open(self.sizing.kv_layout)
        taken = self.sizing.kinds.kv_planes - self.kv_planes_left
        self.kv_planes_left -= count
        return *self._kv, taken

    def used(self) -> None:
        """Somebody works: a pass or step begins, and memory created ahead stays."""
        self.passes += 1
        self.used_s = self.clock()

    def collect(self) -> None:
        """Wait for what was freed, so that answers about memory that are asked one after the other fit together.

        Ranks need not: between passes their answers do not change.
        """
        if self.ranks is None and any(supply.waiting for supply in self.supplies.values()):
            self.sort(wait=True)

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
