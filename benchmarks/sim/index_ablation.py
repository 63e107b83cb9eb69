"""Which index finds the forecast policy's victim: what it costs, and what its choice does to the hit rate.

    python -m benchmarks.sim.index_ablation      # results/index-ablation.json

`scan` scores one numpy table of all candidates for every victim: the exact argmin, the ceiling of hit rate. `sample:K`
scores at most K rows of the same table, every (n / K)th from a seeded random start, as LHD, Hyperbolic caching and
Redis sample; with up to K candidates that is the scan. `sample:1024` is served. The row `aging` of the committed result
is the index before it, measured at 24767d7, the last commit that has it.

Cost: microseconds of processor time of `put` and of `victim` at a number of candidates. Per request the clock moves by
10 ms, one victim leaves, one candidate comes and one is used again, the latter two by `put`. Every request is repeated
`--repeats` times over and counts with its lowest time, as in decision_cost.py. Hit rate: the cells of the grid `main`
at three held-out seeds, and two with thousands of candidates, in points of tokens; `below` is what the scan has more.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.provenance import head, write
from benchmarks.sim.grids import CAPACITIES, HELD_OUT_SEEDS
from benchmarks.sim.models import MARCONI
from sglang_hybrid.prefix import FORM
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.eviction.gdsf import density
from sglang_hybrid.prefix.eviction.sampled_index import SampledIndex
from sglang_hybrid.prefix.policies import POLICIES, Pricing
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.sim import workloads
from sglang_hybrid.sim.prefix_cache import PrefixCache
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.trace import Trace

MANY = {"lmsys?sessions=4000&sps=50": (150.0,), "sharegpt?sessions=4000&sps=50": (80.0,)}


INDICES: dict[str, Callable[[np.ndarray], Any]] = {
    "scan": partial(SampledIndex, sample=sys.maxsize),
    **{f"sample:{k}": partial(SampledIndex, sample=k) for k in (16, 64, 256, 1024)},
}


class Victims:
    """The candidates of the forecast policy, as its own index has them, in any index above."""

    def __init__(self, index: Any) -> None:
        self._index, self.most = index, 0
        self.discard, self.check = index.discard, index.check

    def put(self, candidate: Candidate) -> None:
        value = density(MARCONI, candidate) or 1e-300
        self._index.put(candidate.id, candidate.reuse_class, candidate.last_s, value)

    def pop(self, now: float) -> int | None:
        self.most = max(self.most, len(self._index))
        return self._index.pop(now)

    def __len__(self) -> int:
        return len(self._index)


def hit_rate(name: str, trace: Trace, gb: float) -> tuple[float, int]:
    """Token hit rate of the forecast policy over the index `name`, in points, and the most candidates it had."""
    made: list[Victims] = []

    def index(pricing: Pricing) -> Victims:
        made.append(Victims(INDICES[name](pricing.table.index)))
        return made[-1]

    capacity = round(gb * 1e9)
    cache = PrefixCache(MARCONI, capacity, POLICIES["forecast"]._replace(eviction=index))
    result = replay(trace, cache, capacity, time.process_time)
    result.check()
    return 100.0 * int(result.hit_tokens.sum()) / trace.n_input_tokens, max(victims.most for victims in made)


def cost(name: str, candidates: int, requests: int, repeats: int) -> dict[str, Any]:
    """Percentiles of microseconds of processor time per `put` and per victim."""
    runs = np.min([_cost(name, candidates, requests) for _ in range(repeats)], axis=0) * 1e-3
    row: dict[str, Any] = {"index": name, "candidates": candidates}
    for what, times in (("put", runs[:, :2].ravel()), ("victim", runs[:, 2])):
        row[what] = {f"p{p}": round(float(np.percentile(times, p)), 1) for p in (50, 99)}
    return row


def _cost(name: str, candidates: int, requests: int) -> np.ndarray:
    """Nanoseconds of shape [requests, 3]: a new candidate, one used again, a victim."""
    rng = np.random.default_rng(1)
    table = ReuseTable(PRIORS)
    index = INDICES[name](table.index)
    total = candidates + requests
    classes = rng.integers(table.classes, size=total).tolist()
    densities = rng.lognormal(0.0, 1.0, total).tolist()
    now = 0.0
    for entry in range(candidates):
        now += 0.01
        index.put(entry, classes[entry], now, densities[entry])
    live, clock = list(range(candidates)), time.thread_time_ns
    at = {entry: entry for entry in live}
    times = np.zeros((requests, 3), np.int64)
    gc.collect()
    gc.freeze()
    for step in range(requests):
        now += 0.01
        new = candidates + step
        t0 = clock()
        victim = index.pop(now)
        t1 = clock()
        index.put(new, classes[new], now, densities[new])
        t2 = clock()
        place = at.pop(victim)
        live[place], at[new] = new, place
        again = live[int(rng.integers(candidates))]
        t3 = clock()
        index.put(again, classes[again], now, densities[again])
        times[step] = t2 - t1, clock() - t3, t1 - t0
    gc.unfreeze()
    index.check()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="of the held-out seeds of the grid")
    arguments = parser.parse_args()
    result = head("numpy") | {"form": FORM, "requests": arguments.requests, "repeats": arguments.repeats}
    costs = []
    for candidates in (100, 1000, 10_000, 100_000):
        for name in INDICES:
            costs.append(cost(name, candidates, arguments.requests, arguments.repeats))
            print(costs[-1], flush=True)
    cases = [(case, gb) for case, gbs in (CAPACITIES | MANY).items() for gb in gbs]
    hits = []
    for case, gb in cases:
        for seed in HELD_OUT_SEEDS[: arguments.seeds]:
            row: dict[str, Any] = {"workload": case, "gb": gb, "seed": seed, "hit_rate": {}}
            trace = workloads.parse(f"workload:{case}{'&' if '?' in case else '?'}seed={seed}", 0)
            for name in INDICES:
                hit, row["candidates"] = hit_rate(name, trace, gb)
                row["hit_rate"][name] = round(hit, 3)
            hits.append(row)
            print(row, flush=True)
    worst = {name: max(r["hit_rate"]["scan"] - r["hit_rate"][name] for r in hits) for name in INDICES}
    mean = {name: sum(r["hit_rate"]["scan"] - r["hit_rate"][name] for r in hits) / len(hits) for name in INDICES}
    below = {name: {"mean": round(mean[name], 3), "worst": round(worst[name], 3)} for name in INDICES}
    result |= {"about": __doc__, "below": below, "cost": costs, "hits": hits}
    print(below, write("sim", "index-ablation", result))


if __name__ == "__main__":
    main()
