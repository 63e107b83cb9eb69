"""Elastic memory on a GPU: what each driver call costs, what the device says is free, and a kernel beside the moving.

python -m benchmarks.memory.gpu [--rounds 200]            # then: compute-sanitizer python ... --rounds 2 --small
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmarks import provenance
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.device.driver import Driver
from sglang_hybrid.memory.backing import Run

MIB = 1 << 20
COLUMNS = {
    "reserve .. release": "median and p99 microseconds of one driver call for a granule of this size",
    "returned_error_bytes": "bytes the device does not report as free again after everything was given back",
    "kernel": "a kernel adds one to a mapped granule again and again while its neighbours are mapped and unmapped",
}


def quantiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 of seconds, in microseconds."""
    ordered = sorted(values)
    return {name: round(ordered[int(len(ordered) * at)] * 1e6, 2) for name, at in (("p50", 0.5), ("p99", 0.99))}


def calls(driver: Driver, granule_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Latency of every call, one granule at a time, each handle created, mapped and released once per round."""
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for _ in range(rounds):
        address = timed("reserve", driver.reserve, granule_bytes, granule_bytes)
        handle = timed("create", driver.create, granule_bytes)
        timed("map", driver.map, address, granule_bytes, handle)
        timed("set_access", driver.allow, address, granule_bytes)
        driver.synchronize()
        timed("unmap", driver.unmap, address, granule_bytes, handle)
        timed("release", driver.release, handle, granule_bytes)
        timed("free_reservation", driver.free_reservation, address, granule_bytes)
    return {name: quantiles(values) for name, values in times.items()}


def returned(driver: Driver, granules: int) -> dict[str, int]:
    """Grow by `granules` of 2 MiB, give them back, and compare what the device reports with what was released."""
    before = driver.available_bytes()
    with PooledBacking(driver, [granules], 2 * MIB, granules) as backing:
        backing.map([Run(0, 0, granules)])
        grown = before - driver.available_bytes()
        backing.unmap([Run(0, 0, granules)])
        kept = before - driver.available_bytes()
        backing.trim(0)
        left = before - driver.available_bytes()
    size = granules * 2 * MIB
    return {
        "asked": size,
        "grown": grown,
        "pooled_after_unmap": kept,
        "returned_error_bytes": left,
        "grown_error": grown - size,
    }


def beside_a_kernel(driver: Driver, rounds: int) -> dict[str, Any]:
    """Map and unmap the neighbours of a granule a kernel works on; the kernel's sums must come out exact."""
    import torch

    from sglang_hybrid.device.tensors import bytes_at

    device = torch.device("cuda", 0)
    with PooledBacking(driver, [8], 2 * MIB, 8) as backing:
        backing.map([Run(0, 3, 1)])
        numbers = bytes_at(backing.address(0, 3), 2 * MIB, device, backing).view(torch.float32)
        numbers.zero_()
        torch.cuda.synchronize()
        add = torch.compile(lambda x: x.add_(1.0), dynamic=False)  # inductor emits a Triton kernel
        add(numbers)
        stalls = []
        for index in range(rounds):
            add(numbers)
            neighbour = Run(0, (4 + index % 4), 1)
            start = time.perf_counter()
            backing.map([neighbour])
            stalls.append(time.perf_counter() - start)
            add(numbers)
            backing.unmap([neighbour])
        torch.cuda.synchronize()
        exact = bool((numbers == float(1 + 2 * rounds)).all())
    if not exact:
        raise ConfigError(f"a kernel saw wrong memory while neighbours moved: {rounds} rounds")
    return {"exact": exact, "rounds": rounds, "map_beside_kernel": quantiles(stalls)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--small", action="store_true", help="a case small enough for compute-sanitizer")
    args = parser.parse_args()
    import torch

    torch.zeros(1, device="cuda")  # makes the context current
    driver = CudaDriver(0)
    sizes = (2,) if args.small else (2, 8, 32, 128)
    result = {
        "calls": {f"{size} MiB": calls(driver, size * MIB, args.rounds) for size in sizes},
        "returned": returned(driver, 16 if args.small else 1024),
        "kernel": beside_a_kernel(driver, args.rounds),
    }
    head = provenance.head("torch", "cuda-bindings")
    extra = {"gpu": torch.cuda.get_device_name(0), "rounds": args.rounds}
    print(provenance.write("memory", "gpu", {**head, **extra, "columns": COLUMNS, "result": result}))


if __name__ == "__main__":
    main()
