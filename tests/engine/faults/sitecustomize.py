"""Loaded by a server's processes at their start: memory fails while a file exists in the folder ELASTIC_FAULTS."""

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

    def available_bytes(driver: HostDriver) -> int:
        """Somebody else has taken the machine's memory."""
        return 0 if (faults / "taken").exists() else available(driver)

    def map_once(driver: HostDriver, address: int, size_bytes: int, handle: int) -> None:
        """Every second granule cannot be mapped for a while, or none at all."""
        if (faults / "map").exists():
            driver.hits = getattr(driver, "hits", 0) + 1
            if driver.hits % 2 == 0 and driver.hits < 40:
                raise PoolExhausted(f"no more mappings: {size_bytes}")
        if (faults / "none").exists():
            raise PoolExhausted(f"no mappings at all: {size_bytes}")
        map_granule(driver, address, size_bytes, handle)

    def reserve_little(arena: Arena, pages: Mapping[str, int]) -> bool:
        """There is room for short prompts, not for a chunk of a long one."""
        if (faults / "little").exists() and pages.get(KV, 0) * arena.sizing.kinds.page_tokens > 300:
            return False
        return reserve(arena, pages)

    Arena.reserve = reserve_little  # type: ignore[method-assign]
    HostDriver.available_bytes = available_bytes  # type: ignore[method-assign]
    HostDriver.map = map_once  # type: ignore[method-assign]
