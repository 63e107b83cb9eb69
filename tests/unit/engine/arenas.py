"""Arenas over real host memory, and host memory that can be made to run out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.engine.pools.ranks import Ranks
from sglang_hybrid.memory.sizing import Kinds, choose


class FailingHost(HostDriver):
    """Host memory that can be made to run out."""

    failing = False

    def create(self, size_bytes: int) -> int:
        if self.failing:
            raise PoolExhausted(f"somebody else has it: {size_bytes}")
        return super().create(size_bytes)


def opened(
    driver_class: type[HostDriver],
    clock: Callable[[], float],
    page_tokens: int = 4,
    total_bytes: int = 8 << 20,
    ranks: Ranks | None = None,
) -> tuple[Arena, HostDriver]:
    """An arena with pools of both kinds, and the memory behind it; close `arena.pooled`, then the driver."""
    sizing = choose(Kinds(256, 2, page_tokens, 20_000), total_bytes, 4096, 2)
    driver = driver_class(sizing.total * sizing.granule_bytes, sizing.granule_bytes)
    arena = Arena(sizing, driver, torch.device("cpu"), 1.0, clock, ranks=ranks)
    for layout in (sizing.state_layout, sizing.kv_layout):
        arena.open(layout)
    return arena, driver
