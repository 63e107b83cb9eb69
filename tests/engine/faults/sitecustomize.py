"""Loaded by a server's processes at their start: memory fails while a file exists in the folder ELASTIC_FAULTS.

The text of the file is the rank that fails, if there are several; all of them if it is empty.
"""

import os
from collections.abc import Mapping
from pathlib import Path

if "ELASTIC_FAULTS" in os.environ:
    from sglang_hybrid.core.errors import PoolExhausted
    from sglang_hybrid.device.host import HostDriver
    from sglang_hybrid.engine.pools.arena import Arena
    from sglang_hybrid.memory.sizing import KV

    faults = Path(os.environ["ELASTIC_FAULTS"])
    available, map_granule, reserve = HostDriver.available_bytes, HostDriver.map, Arena.reserve

    def failing(fault: str) -> bool:
        """Whether `fault` is on, in this rank."""
        import torch

        try:
            rank = (faults / fault).read_text()
        except FileNotFoundError:
            return False
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        return not (rank and several) or int(rank) == torch.distributed.get_rank()

    def available_bytes(driver: HostDriver) -> int:
        """Somebody else has taken the machine's memory."""
        return 0 if failing("taken") else available(driver)

    def map_once(driver: HostDriver, address: int, size_bytes: int, handle: int) -> None:
        """Every second granule cannot be mapped for a while, or none at all."""
        if failing("map"):
            driver.hits = getattr(driver, "hits", 0) + 1
            if driver.hits % 2 == 0 and driver.hits < 40:
                raise PoolExhausted(f"no more mappings: {size_bytes}")
        if failing("none"):
            raise PoolExhausted(f"no mappings at all: {size_bytes}")
        map_granule(driver, address, size_bytes, handle)

    def reserve_little(arena: Arena, pages: Mapping[str, int]) -> bool:
        """There is room for short prompts and for one chunk of a long one, not for its second; on no rank if on one."""
        on = failing("little")
        if arena.ranks is not None:  # the file comes and goes between the looks of two ranks
            on = not arena.ranks.agree(not on, (0, 0, 0))
        if not on:
            arena.chunks = False
        elif pages.get(KV, 0) * arena.sizing.kinds.page_tokens > 300:
            if getattr(arena, "chunks", False):
                return False
            arena.chunks = reserve(arena, pages)
            return arena.chunks
        return reserve(arena, pages)

    Arena.reserve = reserve_little  # type: ignore[method-assign]
    HostDriver.available_bytes = available_bytes  # type: ignore[method-assign]
    HostDriver.map = map_once  # type: ignore[method-assign]
