"""Elastic memory on the host, for real: resident memory, allocation cost beside SGLang's, resize stalls.

    SGLANG_USE_CPU_ENGINE=1 python -m benchmarks.memory.host [--rounds 400]

The shapes are Qwen3-Next's at TP1 with 2 MiB granules: 24 KV planes of 1 KiB per token, 36 state planes of 2 MiB.
"""

import argparse
import os
import time

import torch

from benchmarks import provenance
from benchmarks.memory.allocation import COLUMNS as ALLOCATION_COLUMNS
from benchmarks.memory.allocation import churn, pairs, quantiles, sorting
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.memory.budget import Budget, ReturnConfig
from sglang_hybrid.memory.layout import Layout, Planes, first_planes
from sglang_hybrid.memory.pool import Pool

GRANULE = 2 << 20
COLUMNS = {
    "resident_error_granules": "resident set minus what the account says, in granules, worst over the cycle",
    "stall": "one allocation that needs a new column: pooled handles mapped on the spot, or a column kept in reserve",
    "creation": "the same with nothing pooled: physical memory is created on the critical path",
    "elapsed_us, processor_us": "wall clock, and processor time of the thread: the machine is shared, so they differ",
    **ALLOCATION_COLUMNS,
}


def resident_bytes() -> int:
    """Anonymous resident memory of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def qwen3_next(kv_columns: int, states: int) -> list[Layout]:
    """KV and state layouts of Qwen3-Next at TP1."""
    kv = Layout("kv", (Planes("kv", 24, 1024),), kv_columns * 2048, GRANULE)
    return [kv, Layout("state", (Planes("temporal", 36, GRANULE),), states, GRANULE)]


def build(layouts: list[Layout], total: int) -> tuple[Budget, PooledBacking, list[Pool], HostDriver]:
    """Budget of `total` granules over host memory, with one pool per layout."""
    driver = HostDriver(total * GRANULE, GRANULE)
    backing = PooledBacking(driver, [n for layout in layouts for n in layout.plane_granules], GRANULE, total)
    budget = Budget(total * GRANULE, GRANULE, backing, returns=ReturnConfig(idle=0))
    pools = [budget.add_pool(layout, first) for layout, first in zip(layouts, first_planes(layouts), strict=True)]
    return budget, backing, pools, driver


def resident(cycles: int) -> dict:
    """Grow KV, shrink it, grow states out of the same budget, give everything back; compare RSS with the account."""
    budget, backing, (kv, state), driver = build(qwen3_next(6, 6), 240)
    kv.free(kv.alloc(1))
    state.free(state.alloc(1))
    for name in ("kv", "state"):
        budget.pools[name].now = 0.0
    budget.settle(1.0)
    backing.trim(0)
    base = resident_bytes()
    log, worst = [], 0.0

    def note(what: str) -> None:
        nonlocal worst
        real = (resident_bytes() - base) / GRANULE
        said = backing.committed_bytes / GRANULE
        worst = max(worst, abs(real - said))
        log.append(
            {"after": what, "resident_granules": round(real, 2), "account_granules": said, "mapped": budget.mapped}
        )

    for _ in range(cycles):
        pages = kv.alloc(6 * 2048)
        note("6 KV columns")
        kv.free(pages[2048:])
        budget.settle(1.0)
        note("5 KV columns returned to the pool of handles")
        slots = state.alloc(4)
        note("4 states in the same memory")
        kv.free(pages[:2048])
        state.free(slots)
        budget.settle(1.0)
        backing.trim(0)
        note("everything given back")
    backing.close()
    driver.close()
    return {"resident_error_granules": round(worst, 3), "granule_bytes": GRANULE, "pools": 2, "steps": log[:4]}


def stalls(rounds: int) -> dict:
    """How long an allocation waits for a new column of each pool."""
    found = {}
    for which, name in enumerate(("kv", "state")):
        budget, backing, pools, driver = build(qwen3_next(4, 4), 200)
        pool, size = pools[which], pools[which].layout.column_pages

        def once(prepared: bool, pool: Pool = pool, size: int = size, budget: Budget = budget) -> tuple[float, float]:
            if prepared:
                pool.free(pool.alloc(size))
                pool.sort()  # its column stays mapped until memory is returned
            start, busy = time.perf_counter(), time.thread_time()
            pages = pool.alloc(size)
            took = time.perf_counter() - start, time.thread_time() - busy
            pool.free(pages)
            budget.settle(1.0)
            return took

        cold = []
        for _ in range(min(rounds, 20)):
            cold.append(once(False))
            backing.trim(0)
        backing.prefault(2 * pool.layout.column_granules)
        once(False)
        found[name] = {
            "granules_per_column": pool.layout.column_granules,
            "stall, pooled handles": quantiles([once(False) for _ in range(rounds)]),
            "stall, one column in reserve": quantiles([once(True) for _ in range(rounds)]),
            "creation": quantiles(cold),
        }
        print(name, found[name], flush=True)
        backing.close()
        driver.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    result = {"resident": resident(5), "stall": stalls(rounds), "sorting": sorting(rounds)}
    result |= {"pairs": pairs(rounds), "churn": churn(4 * rounds)}
    head = provenance.head("sglang", "torch", "numpy")
    scope = "host memory, one thread, machine shared with other work; not run on a GPU"
    extra = {"rounds": rounds, "load_average": [round(load, 1), round(os.getloadavg()[0], 1)], "scope": scope}
    print(provenance.write("memory", "host", {**head, **extra, "columns": COLUMNS, "result": result}))


if __name__ == "__main__":
    main()
