"""What elastic memory assumes of CUDA virtual memory, asked of a driver: rules, and what each call costs.

Every function is one question (see questions.py). Times are in microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.memory.machine import MIB, Machine
from benchmarks.memory.questions import quantiles
from sglang_hybrid.core.spec import PRESETS
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.tensors import bytes_at
from sglang_hybrid.memory.backing import Run
from sglang_hybrid.memory.sizing import CUDA, Kinds, choose

BUDGETS_GB = (20, 40, 70, 110, 140)
KERNEL_MS = 100.0
MODEL = "qwen3-next-80b-a3b"


def chosen_granules() -> list[int]:
    """Bytes of every granule that is chosen for a published model and a budget, on one rank or four."""
    found = set()
    for spec in PRESETS.values():
        if not spec.layer_counts.get("attention") or not spec.is_recurrent:
            continue
        for ranks in (1, 4):
            rank = spec.per_rank(ranks)
            kinds = Kinds(rank.kv_row_bytes, rank.kv_planes, 1, rank.checkpoint_bytes)
            found |= {choose(kinds, gigabytes * 10**9, CUDA, 5).granule_bytes for gigabytes in BUDGETS_GB}
    return sorted(found)


def granularity(machine: Machine) -> dict[str, int]:
    """Bytes of the smallest unit that can be mapped, and of the one that is recommended."""
    flags = machine.api.CUmemAllocationGranularity_flags
    of = machine.driver._properties
    wanted = {
        "minimum": flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        "recommended": flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
    }
    return {name: int(machine.api.cuMemGetAllocationGranularity(of, flag)[1]) for name, flag in wanted.items()}


def alignments(machine: Machine) -> dict[str, str]:
    """What cuMemAddressReserve says to each alignment in MiB; only 0 and powers of two are documented."""
    api, said = machine.api, {}
    for mib in (0, 2, 4, 6, 8, 10, 14, 38, 64):
        size = 3 * max(mib, 2) * MIB
        status, address = api.cuMemAddressReserve(size, mib * MIB, 0, 0)
        said[f"{mib} MiB"] = status.name
        if status == api.CUresult.CUDA_SUCCESS:
            api.cuMemAddressFree(address, size)
    return said


def _timed(times: dict[str, list[float]], name: str, call: Callable[..., Any], *args: Any) -> Any:
    start = time.perf_counter()
    result = call(*args)
    times.setdefault(name, []).append(time.perf_counter() - start)
    return result


def _round(machine: Machine, size: int, times: dict[str, list[float]], busy: Callable[[], None]) -> None:
    """Every call once for a granule of `size` bytes, `busy` before each."""
    driver = machine.driver

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        busy()
        return _timed(times, name, call, *args)

    address = timed("reserve", driver.reserve, size)
    handle = timed("create", driver.create, size)
    timed("map", driver.map, address, size, handle)
    timed("set_access", driver.allow, address, size)
    timed("zero, launched", driver.zero, [address], size)
    machine.synchronize()
    timed("unmap", driver.unmap, address, size, handle)
    timed("release", driver.release, handle, size)
    timed("free_reservation", driver.free_reservation, address, size)
    machine.synchronize()


def calls(machine: Machine, rounds: int) -> dict[str, Any]:
    """What each call costs, for every granule that is chosen and two that were chosen once."""
    found = {}
    for size in sorted({*chosen_granules(), 38 * MIB, 128 * MIB}):
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            _round(machine, size, times, lambda: None)
        found[f"{size // MIB} MiB"] = {name: quantiles(seconds) for name, seconds in times.items()}
    return found


def calls_beside_a_kernel(machine: Machine, rounds: int) -> dict[str, Any]:
    """The same while another stream runs a kernel of 100 ms: a call that takes tens of milliseconds waits for it."""
    times: dict[str, list[float]] = {}

    def busy() -> None:
        machine.synchronize()
        with machine.side():
            machine.spin(KERNEL_MS)

    for _ in range(rounds):
        _round(machine, 2 * MIB, times, busy)
    found: dict[str, Any] = {name: quantiles(seconds) for name, seconds in times.items()}
    waits = [name for name, seconds in times.items() if min(seconds) > KERNEL_MS / 2e3]
    return {**found, "waits for the kernel": waits}


def runs(machine: Machine, rounds: int) -> dict[str, Any]:
    """One set-access and one memset over several granules, against one for each."""
    driver, size, found = machine.driver, 2 * MIB, {}
    for count in (1, 8, 37):
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            base = driver.reserve(count * size)
            handles = [driver.create(size) for _ in range(count)]
            places = [base + at * size for at in range(count)]
            for address, handle in zip(places, handles, strict=True):
                driver.map(address, size, handle)
            _timed(times, "set_access of all", driver.allow, base, count * size)
            _timed(times, "zeros one by one, launched", driver.zero, places, size)
            machine.synchronize()
            for address, handle in zip(places, handles, strict=True):
                driver.unmap(address, size, handle)
                driver.release(handle, size)
            driver.free_reservation(base, count * size)
        found[f"{count} granules"] = {name: quantiles(seconds) for name, seconds in times.items()}
    return found


def memset_over_granules(machine: Machine) -> str:
    """What one memset over four granules that lie side by side answers; ours go granule by granule."""
    with PooledBacking(machine.driver, [4], 2 * MIB, 4) as backing:
        backing.map([Run(0, 0, 4)])
        (status,) = machine.api.cuMemsetD8Async(backing.address(0), 0, 8 * MIB, 0)
        machine.synchronize()
        return str(status.name)


def column(machine: Machine, rounds: int) -> dict[str, Any]:
    """A column of KV and one of states of Qwen3-Next: what a request waits for, with memory at hand and without."""
    spec = PRESETS[MODEL]
    planes = 2 * spec.layer_counts["attention"]
    state = -(-spec.checkpoint_bytes // (2 * MIB))
    found = {}
    for size, name, wanted in (
        (2 * MIB, "KV", [Run(plane, 0, 1) for plane in range(planes)]),
        (8 * MIB, "KV", [Run(plane, 0, 1) for plane in range(planes)]),
        (2 * MIB, "state", [Run(0, 0, state)]),
    ):
        count = sum(run.length for run in wanted)
        times: dict[str, list[float]] = {}
        with PooledBacking(machine.driver, [state] * planes, size, count) as backing:
            for _ in range(rounds):
                backing.prefault(count)
                _timed(times, "map, memory at hand", backing.map, wanted)
                machine.synchronize()
                _timed(times, "unmap", backing.unmap, wanted)
                backing.trim(0)
                _timed(times, "map, memory created", backing.map, wanted)
                machine.synchronize()
                backing.unmap(wanted)
        found[f"{name}, {count} x {size // MIB} MiB"] = {kind: quantiles(each) for kind, each in times.items()}
    return found


def synchronize(machine: Machine, rounds: int) -> dict[str, float]:
    """A wait for an idle GPU, before every batch of unmaps."""
    times: dict[str, list[float]] = {}
    for _ in range(10 * rounds):
        _timed(times, "synchronize", machine.driver.synchronize)
    return quantiles(times["synchronize"])


def many_handles(machine: Machine, count: int) -> dict[str, Any]:
    """Whether calls become slower as granules become many: the first tenth of them against the last."""
    size, driver = 2 * MIB, machine.driver
    times: dict[str, list[float]] = {}
    base = driver.reserve(count * size)
    handles = []
    for at in range(count):
        handles.append(_timed(times, "create", driver.create, size))
        _timed(times, "map", driver.map, base + at * size, size, handles[-1])
        _timed(times, "set_access", driver.allow, base + at * size, size)
    for at, handle in enumerate(handles):
        _timed(times, "unmap", driver.unmap, base + at * size, size, handle)
        _timed(times, "release", driver.release, handle, size)
    driver.free_reservation(base, count * size)
    tenth = max(1, count // 10)
    return {
        name: {"first tenth": quantiles(each[:tenth]), "last tenth": quantiles(each[-tenth:])}
        for name, each in times.items()
    }


def thread_without_context(machine: Machine) -> dict[str, str]:
    """What the driver answers a thread that torch never saw, before the device is bound to it and after."""
    api, driver, said = machine.api, machine.driver, {}

    def run() -> None:
        for when in ("before", "after"):
            status, handle = api.cuMemCreate(2 * MIB, driver._properties, 0)
            said[f"create, {when}"] = status.name
            if status == api.CUresult.CUDA_SUCCESS:
                said[f"release, {when}"] = api.cuMemRelease(handle)[0].name
            said[f"free memory, {when}"] = api.cuMemGetInfo()[0].name
            driver.bind()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return said


def returned(machine: Machine, granules: int) -> dict[str, int]:
    """Bytes that the device reports: taken by so many granules of 2 MiB, kept by the pool, not given back."""
    driver = machine.driver
    before = driver.available_bytes()
    with PooledBacking(driver, [granules], 2 * MIB, granules) as backing:
        backing.map([Run(0, 0, granules)])
        grown = before - driver.available_bytes()
        backing.unmap([Run(0, 0, granules)])
        kept = before - driver.available_bytes()
        backing.trim(0)
        left = before - driver.available_bytes()
    return {"asked": granules * 2 * MIB, "taken": grown, "kept after unmap": kept, "not given back": left}


def old_bytes(machine: Machine) -> dict[str, Any]:
    """What fresh and recycled memory holds before it is zeroed, and what a backing lets anybody see of it."""
    driver, size = machine.driver, 2 * MIB
    base, handle, found = driver.reserve(2 * size), driver.create(size), {}
    for at, name in ((0, "fresh: bytes that are not zero"), (1, "recycled: bytes that are not zero")):
        driver.map(base + at * size, size, handle)
        driver.allow(base + at * size, size)
        seen = bytes_at(base + at * size, size, machine.device)
        found[name] = int((seen != 0).sum())
        seen.fill_(0x7F)
        machine.synchronize()
        driver.unmap(base + at * size, size, handle)
    driver.release(handle, size)
    driver.free_reservation(base, 2 * size)
    with PooledBacking(driver, [4, 4], size, 4) as backing:
        backing.map([Run(0, 0, 4)])
        bytes_at(backing.address(0), 4 * size, machine.device, backing).fill_(0x7F)
        backing.unmap([Run(0, 0, 4)])
        backing.map([Run(1, 0, 4)])
        seen = bytes_at(backing.address(1), 4 * size, machine.device, backing)
        found["through a backing: bytes that are not zero"] = int((seen != 0).sum())
    floats = torch.randn(1 << 20, device=machine.device).view(torch.bfloat16)
    found["share of NaN, float32 read as bfloat16"] = float(floats.isnan().float().mean())
    return found
