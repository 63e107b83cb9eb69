"""AVMP's Tables 1 to 6 and the columns beside them, for the published allocators and for ours. Pure simulation.

python -m benchmarks.memory.policies [tables queues sweeps] [--sharegpt prompts.json]
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from avmp.elastic_replay import ElasticReplay, layer_major, page_major, per_layer_pages
from avmp.geometry import GEOMETRIES, Geometry
from avmp.intervals import Interval, paired_delta, paired_ratio
from avmp.padded import PaddedUnified
from avmp.pressure import AvmpConfig
from avmp.published import Allocator, TwoStores
from avmp.queue import ByteGranular, ColumnGranular, Server, StoresServer, serve
from avmp.replay import Outcome, replay
from avmp.workloads import WORKLOADS, generate
from benchmarks import provenance

SYNTHETIC = ("uniform_short", "mixed_long", "agentic_burst")
SIZES_GIB = (1, 4)
REPLICATES = 3
GRANULE = 2 << 20
Make = Callable[[Geometry, int], Allocator]


def fixed(share: float) -> Make:
    return lambda geometry, size: TwoStores(geometry, size, share, scan_evictions=True)


def dynamic(**settings) -> Make:
    return lambda geometry, size: TwoStores(geometry, size, 0.5, AvmpConfig(**settings), oversized=True)


def elastic(layouts, granule_bytes=GRANULE, lockstep=True):
    return lambda geometry, size: ElasticReplay(geometry, size, layouts, granule_bytes, lockstep)


def column_ideal(lockstep: bool) -> Callable[[Geometry, int], Server]:
    return lambda g, size: ColumnGranular(g, size, layer_major(g, size, GRANULE), lockstep)


PUBLISHED: dict[str, Make] = {
    "padded_unified": PaddedUnified,
    "fixed_dual_mr05": fixed(0.5),
    "fixed_dual_mr09": fixed(0.9),
    "avmp_static_mr05": lambda geometry, size: TwoStores(geometry, size, 0.5, oversized=True),
    "avmp_dynamic_b128": dynamic(),
}
OURS = {
    "elastic": elastic(layer_major),
    "elastic, whole promise": elastic(layer_major, lockstep=False),
    "elastic, page-major": elastic(page_major),
    "elastic, 64 KiB granules": elastic(layer_major, 64 << 10),
    "elastic, one page per layer": elastic(per_layer_pages),
}
COLUMNS = {
    "oom": "the paper's N_OOM: failing allocation calls; a refused request of ours counts as one",
    "completed": "the paper's completed requests: none of their own calls failed; killed ones may be among them",
    "killed": "requests that lost pages while they were running",
    "intact": "requests that neither failed nor lost pages",
    "reserved": "most bytes reserved, as a multiple of the budget, worst cell",
    "makespan_ticks": "queue without kills: ticks until the last request ends, sum over cells",
    "tokens_per_tick": "queue: tokens of served requests over makespan, all cells",
    "dropped": "queue: requests that never ran",
    "totals": "sums over 12 cells (2 models x 2 sizes x 3 seeds) of the mean over seeds, as in Table 1",
}


class Grid:
    """Replays of every cell, made once per variant."""

    def __init__(self, prompts: np.ndarray | None) -> None:
        self._traces = {
            (name, replicate): generate(name, replicate, prompts)
            for name in WORKLOADS
            for replicate in range(REPLICATES)
        }
        self._outcomes: dict[tuple[str, str], list[Outcome]] = {}

    def cells(self):
        return [(g, size << 30, r) for g in GEOMETRIES.values() for size in SIZES_GIB for r in range(REPLICATES)]

    def outcomes(self, name: str, make: Make, workload: str) -> list[Outcome]:
        key = (name, workload)
        if key not in self._outcomes:
            self._outcomes[key] = [replay(make(g, size), self._traces[workload, r], g) for g, size, r in self.cells()]
        return self._outcomes[key]

    def summary(self, name: str, make: Make, workloads=SYNTHETIC) -> dict:
        rows, spread, total = {}, 0.0, dict.fromkeys(("oom", "completed", "killed", "intact", "rebalances"), 0.0)
        reserved = 0.0
        for workload in workloads:
            found = self.outcomes(name, make, workload)
            oom = np.array([outcome.oom for outcome in found], dtype=float).reshape(-1, REPLICATES)
            variance = float((oom.std(axis=1) ** 2).sum())
            spread += variance
            rows[workload] = {"oom": round(float(oom.mean(axis=1).sum()), 2), "sigma": round(math.sqrt(variance), 2)}
            rows[workload]["batch_p50"] = float(np.median([outcome.batch_p50 for outcome in found]))
            for column in total:
                value = sum(getattr(outcome, column) for outcome in found) / REPLICATES
                total[column] += value
                rows[workload][column] = round(value, 2)
            reserved = max([reserved, *(o.reserved_bytes / c[1] for o, c in zip(found, self.cells(), strict=True))])
        totals = {column: round(value, 2) for column, value in total.items()}
        medians = np.array([[o.rebalances for o in self.outcomes(name, make, w)] for w in workloads]).reshape(
            -1, REPLICATES
        )
        totals["rebalances_median"] = float(np.median(medians, axis=1).sum())
        migrated = sum(o.migrated_bytes for w in workloads for o in self.outcomes(name, make, w))
        totals["migrated_mib_per_cell"] = round(migrated / len(workloads) / len(self.cells()) / 2**20, 2)
        return {"totals": {**totals, "sigma": round(math.sqrt(spread), 2), "reserved": round(reserved, 4)}, **rows}

    def queue(self, make: Callable[[Geometry, int], Server]) -> dict:
        row = {}
        for workload in WORKLOADS:
            served = [serve(make(g, size), self._traces[workload, r]) for g, size, r in self.cells()]
            makespan = sum(service.makespan for service in served)
            row[workload] = {
                "makespan_ticks": makespan // REPLICATES,
                "tokens_per_tick": round(sum(service.tokens for service in served) / makespan, 3),
                "dropped": round(sum(service.dropped for service in served) / REPLICATES, 2),
            }
        return row


def interval(found: Interval, null: float) -> dict:
    numbers = {name: round(getattr(found, name), 2) for name in ("point", "low", "high")}
    return {**numbers, "pairs": found.pairs, "significant": found.excludes(null)}


def table_2(grid: Grid) -> dict:
    def ooms(name, workloads):
        return [outcome.oom for workload in workloads for outcome in grid.outcomes(name, PUBLISHED[name], workload)]

    rows = {}
    base = "fixed_dual_mr05"
    for workloads in ([name] for name in SYNTHETIC):
        found = paired_delta(ooms("avmp_dynamic_b128", workloads), ooms(base, workloads))
        rows[f"avmp_dynamic_b128 - {base}, {workloads[0]}"] = interval(found, 0.0)
    for name in ("avmp_dynamic_b128", "avmp_static_mr05", "fixed_dual_mr09", "padded_unified"):
        rows[f"{name} - {base}, all"] = interval(paired_delta(ooms(name, SYNTHETIC), ooms(base, SYNTHETIC)), 0.0)
    return rows


def goodput(grid: Grid, name: str, workload: str) -> list[float]:
    """Completed requests per million list elements the released Python code visits to serve the cell."""
    found = grid.outcomes(name, PUBLISHED[name], workload)
    return [outcome.completed / max(outcome.visited, 1) * 1e6 for outcome in found]


def table_3(grid: Grid) -> dict:
    rows = {}
    for workload in WORKLOADS:
        ours, theirs = (goodput(grid, name, workload) for name in ("avmp_dynamic_b128", "fixed_dual_mr05"))
        rows[workload] = interval(paired_ratio(ours, theirs), 1.0)
    return rows


def intact_interval(grid: Grid) -> dict:
    rows = {}
    for name, make in OURS.items():
        ours, theirs = [], []
        for workload in SYNTHETIC:
            ours += [outcome.intact for outcome in grid.outcomes(name, make, workload)]
            theirs += [o.intact for o in grid.outcomes("avmp_dynamic_b128", PUBLISHED["avmp_dynamic_b128"], workload)]
        rows[name] = interval(paired_ratio(ours, theirs), 1.0)
    return rows


def tables(grid: Grid) -> dict:
    """Tables 1 to 4 and the columns beside them."""
    result: dict = {"table_1": {}, "table_4_sharegpt": {}}
    for name, make in {**PUBLISHED, **OURS, "avmp, as its text says": dynamic(gated=True)}.items():
        result["table_1"][name] = grid.summary(name, make)
        result["table_4_sharegpt"][name] = grid.summary(name, make, ("sharegpt",))
        print(name, result["table_1"][name]["totals"], flush=True)
    result["table_2"] = table_2(grid)
    result["table_3_modelled_goodput_ratio"] = table_3(grid)
    result["intact_ratio_to_avmp"] = intact_interval(grid)
    return result


def sweeps(grid: Grid) -> dict:
    """Tables 5 and 6: migration batch, and the thresholds in the released code and as the text describes them."""
    result: dict = {"table_5": {}, "table_6": {}}
    for units in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        result["table_5"][units] = grid.summary(f"batch {units}", dynamic(batch_units=units))
        print("batch", units, result["table_5"][units]["totals"]["oom"], flush=True)
    for low, high in ((0.05, 0.30), (0.05, 0.10), (0.05, 0.20), (0.02, 0.30), (0.10, 0.30)):
        for gated in (False, True) if (low, high) in ((0.05, 0.30), (0.05, 0.10)) else (False,):
            label = f"low {low}, high {high}, {'text' if gated else 'released code'}"
            make = dynamic(threshold_low=low, threshold_high=high, gated=gated)
            result["table_6"][label] = grid.summary(label, make)["totals"]
            print(label, result["table_6"][label]["oom"], flush=True)
    return result


def queues(grid: Grid) -> dict:
    """First come, first served, nobody killed: how long the machine needs."""
    servers: dict[str, Callable[[Geometry, int], Server]] = {
        "byte-granular ideal, whole promise": ByteGranular,
        "byte-granular ideal, lockstep": lambda g, size: ByteGranular(g, size, lockstep=True),
        "layer-major ideal at 2 MiB, whole promise": column_ideal(lockstep=False),
        "layer-major ideal at 2 MiB, lockstep": column_ideal(lockstep=True),
        "static 0.5": lambda g, size: StoresServer(TwoStores(g, size, 0.5)),
        "static 0.9": lambda g, size: StoresServer(TwoStores(g, size, 0.9)),
        "avmp_dynamic_b128": lambda g, size: StoresServer(TwoStores(g, size, 0.5, AvmpConfig(), oversized=True)),
        **OURS,
        "elastic, page-major, whole promise": elastic(page_major, lockstep=False),
        "elastic, one page per layer, whole promise": elastic(per_layer_pages, lockstep=False),
    }
    result = {}
    for name, server in servers.items():
        result[name] = grid.queue(server)
        print(name, result[name], flush=True)
    return result


PARTS = {"tables": tables, "queues": queues, "sweeps": sweeps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"among {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--sharegpt", type=Path, help="JSON list of {'prompt_tokens': n}; default: the built-in quantiles"
    )
    args = parser.parse_args()
    prompts = None
    if args.sharegpt:
        prompts = np.array([entry["prompt_tokens"] for entry in json.loads(args.sharegpt.read_text())])
    grid = Grid(prompts)
    seeds = {name: [workload.base_seed + r for r in range(REPLICATES)] for name, workload in WORKLOADS.items()}
    source = "the AVMP release's 5,000 prompts" if args.sharegpt else "built-in quantiles"
    head = {
        "seeds": seeds,
        "sharegpt_prompts": source,
        "scope": "simulation; no memory is moved, no GPU",
        "columns": COLUMNS,
    }
    for part in args.parts:
        result = PARTS[part](grid)
        print(provenance.write("memory", part, {**provenance.head("numpy"), **head, "result": result}), flush=True)


if __name__ == "__main__":
    main()
