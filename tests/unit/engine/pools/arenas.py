"""Arenas over real host memory, and host memory that can be made to run out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.engine.pools.copies import Begin, Ids, OnHost
from sglang_hybrid.memory.sizing import HOST, Kinds, choose
from sglang_hybrid.memory.supply import Agreement


class FailingHost(HostDriver):
    """Host memory that can be made to run out."""

    failing = False

    def create(self, size_bytes: int) -> int:
        if self.failing:
            raise PoolExhausted(f"somebody else has it: {size_bytes}")
        return super().create(size_bytes)


class Copies:
    """Copies of ids that end when they are told to, in order; `waited` counts those that were read before."""

    def __init__(self) -> None:
        self.begun: list[Late] = []
        self.waited = 0

    def __call__(self, pages: torch.Tensor) -> Late:
        self.begun.append(Late(pages, self))
        return self.begun[-1]

    def arrive(self, count: int) -> None:
        """The next `count` that are under way end."""
        for late in [each for each in self.begun if not each.ended][:count]:
            late.ended = True


class Late(OnHost):
    """A copy from a device, which takes its time."""

    at_once = False

    def __init__(self, pages: torch.Tensor, owner: Copies) -> None:
        super().__init__(pages)
        self.ended, self._owner = False, owner

    def done(self) -> bool:
        return self.ended

    def ids(self) -> Ids:
        self._owner.waited += not self.ended
        self.ended = True
        return super().ids()


def opened(
    driver_class: type[HostDriver],
    clock: Callable[[], float],
    page_tokens: int = 4,
    total_bytes: int = 8 << 20,
    ranks: Agreement | None = None,
    begin_copy: Begin | None = None,
) -> tuple[Arena, HostDriver]:
    """An arena with pools of both kinds, and the memory behind it; close `arena.pooled`, then the driver."""
    sizing = choose(Kinds(256, 2, page_tokens, 20_000), total_bytes, HOST, 2)
    driver = driver_class(sizing.total * sizing.granule_bytes, sizing.granule_bytes)
    arena = Arena(sizing, driver, torch.device("cpu"), 1.0, clock, ranks=ranks, begin_copy=begin_copy)
    for layout in (sizing.state_layout, sizing.kv_layout):
        arena.open(layout)
    return arena, driver
