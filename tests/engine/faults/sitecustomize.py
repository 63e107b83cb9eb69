"""Loaded by a server's processes at their start: memory fails while a file exists in the folder ELASTIC_FAULTS."""

import os
from pathlib import Path

if "ELASTIC_FAULTS" in os.environ:
    from sglang_hybrid.core.errors import PoolExhausted
    from sglang_hybrid.device.host import HostDriver

    faults = Path(os.environ["ELASTIC_FAULTS"])
    available, map_granule = HostDriver.available_bytes, HostDriver.map

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

    HostDriver.available_bytes = available_bytes  # type: ignore[method-assign]
    HostDriver.map = map_once  # type: ignore[method-assign]
