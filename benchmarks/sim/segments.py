"""What segments save, by the memory they have, the popularity of documents and their number; and two ideas, measured.

    python -m benchmarks.sim.segments                  # results/segments.json
    python -m benchmarks.sim.segments tables           # as they stand in the README

A request brings documents in fresh order (`sim/workloads/segments.py`), or an agent its tools and skills. Of the
capacity, `segments_gb` are for segments and the rest for prefixes. Rows by what leaves first: `value` (a server's),
`recency` (HYPIC's LRU), `frequency` (by sightings a second), `clairvoyant` (knows all later requests, a heuristic).
`no segments` is the baseline, `endless` the ceiling. `int8` is `value` with states of one byte.

The second idea: a segment that comes at the same place again is computed in its context, so that what follows upon it
is an exact prefix. `at once`: when it comes there a second time; `rent or buy`: when its seams have cost as much.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import provenance
from sglang_hybrid.core.spec import ModelSpec, preset
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.segment.index import Costs
from sglang_hybrid.segment.keys import Key
from sglang_hybrid.segment.prompt import SegmentedPrompt
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.segments.cache import Memory, SegmentCache
from sglang_hybrid.sim.segments.orders import ByFuture, ByRecency
from sglang_hybrid.sim.segments.play import ENDLESS, clairvoyant, endless, play
from sglang_hybrid.sim.trace import Trace, TraceRequest
from sglang_hybrid.sim.workloads import parse

MODEL = preset("qwen3-next-80b-a3b")
SEEDS = (101, 102, 201)
CAPACITY_GB, SEGMENTS_GB = 16.0, (2.0, 4.0, 8.0)
WORKLOADS = (
    *(f"documents?requests=300&exponent={exponent}" for exponent in (0.6, 0.9, 1.2)),
    *(f"documents?requests=300&per_request={count}" for count in (4, 16)),
    "skills?sessions=60",
)
SHARED = tuple(f"documents?requests=300&again=0&fixed={count}" for count in (0, 2, 4))
SHARED_GB = 4.0
ORDERS = ("value", "recency", "frequency", "clairvoyant", "int8", "a third")


class ByFrequency(ByFuture):
    """What has the fewest sightings a second, times FLOPs per byte, goes: LFU."""

    def __init__(self, table: ReuseTable, costs: Costs) -> None:
        super().__init__({}, costs)
        self._first: dict[Key, float] = {}

    def worth(self, key: Key, tokens: int, transitions: int, mark: Mark, now: float) -> float:
        age = now - self._first.setdefault(key, mark.last_s)
        return (mark.hits + 1) / (age + 60.0) * self._costs.density(tokens, transitions)

    def check(self) -> None:
        pass  # there are no uses to know of


class Exact(SegmentCache):
    """Computes a segment in its context once that has come `pays` times as often as its seams pay for."""

    pays = 0.0

    def _way(self, prompt: SegmentedPrompt, request: TraceRequest) -> frozenset[int]:
        plain = super()._way(prompt, request)
        self._shared: list[int] = []
        number = prompt.first_behind(self._cached(prompt.ids, request).tokens)
        if plain != frozenset(range(number)):
            return plain
        for each in prompt.segments[number:]:
            before = self.identity.key(prompt.ids[: each.range[1]])
            mark = self.index.sight(before, self._elapsed.look(request.ts))
            seams = self.seams.head + self.seams.tail
            if not mark.hits or mark.hits * seams < self.pays * (each.interior[1] - each.interior[0]):
                break
            self._shared.append(each.range[1])
        return frozenset(range(number + len(self._shared)))

    def _boundaries(self, prompt: SegmentedPrompt, request: TraceRequest) -> tuple[int, ...]:
        return tuple(sorted({*request.boundaries, *self._shared}))


def measured(trace: Trace, cache: SegmentCache, capacity: int) -> dict[str, float]:
    result, served = play(trace, cache, capacity, time.process_time)
    result.check()
    cache.index.check()
    return {
        "flop_hit_rate": saved(trace, sum(each.flops for each in served)),
        "prefix_tokens": share(trace, sum(each.hit_tokens for each in served)),
        "segment_tokens": share(trace, sum(each.reused_tokens for each in served)),
        "kept": round(fmean(each.kept for each in served), 4),
        "marked": round(fmean(each.marked for each in served), 4),
        "evicted": cache.index.counts.evicted,
        "refused": cache.index.counts.refused,
    }


def saved(trace: Trace, run: float) -> float:
    whole = sum(float(MODEL.prefill_flops(r.n_input)) for r in trace.requests)
    return round(1.0 - run / whole, 6)


def share(trace: Trace, tokens: int) -> float:
    return round(tokens / trace.n_input_tokens, 6)


def opened(trace: Trace, order: str, capacity: int, memory: Memory) -> SegmentCache:
    left = capacity - memory.total_bytes
    if order == "clairvoyant":
        return clairvoyant(trace, MODEL, left, memory, "forecast")
    if order == "int8":
        return SegmentCache(MODEL, left, replace(memory, dtype="int8"))
    if order == "a third":
        return SegmentCache(MODEL, left, replace(memory, kept=1 / 3))
    known: dict[str, dict[str, Callable[..., Any]]] = {
        "value": {}, "recency": {"order": ByRecency}, "frequency": {"order": ByFrequency},
    }  # fmt: skip
    return SegmentCache(MODEL, left, memory, **known[order])


def memory_rows(workload: str, seed: int) -> Iterator[dict[str, Any]]:
    trace, capacity = parse(f"{workload}&seed={seed}"), round(CAPACITY_GB * 1e9)
    head = {"study": "memory", "workload": workload, "seed": seed, "requests": len(trace)}
    yield {**head, "order": "no segments", "segments_gb": 0.0, **without(trace, capacity, MODEL)}
    memory = Memory(round(SEGMENTS_GB[0] * 1e9))
    ceiling = endless(trace, MODEL, memory, "forecast")
    yield {**head, "order": "endless", "segments_gb": None, **measured(trace, ceiling, 2 * ENDLESS)}
    for gigabytes in SEGMENTS_GB:
        for order in ORDERS:
            cache = opened(trace, order, capacity, Memory(round(gigabytes * 1e9)))
            yield {**head, "order": order, "segments_gb": gigabytes, **measured(trace, cache, capacity)}


def without(trace: Trace, capacity: int, model: ModelSpec) -> dict[str, float]:
    hits = replay(trace, open_cache("forecast", capacity, model), capacity).hit_tokens
    run = sum(float(model.prefill_flops(r.n_input, int(hit))) for r, hit in zip(trace.requests, hits, strict=True))
    return {"flop_hit_rate": saved(trace, run), "prefix_tokens": share(trace, int(np.sum(hits)))}


def exact_rows(workload: str, seed: int) -> Iterator[dict[str, Any]]:
    trace, capacity = parse(f"{workload}&seed={seed}"), round(CAPACITY_GB * 1e9)
    memory = Memory(round(SHARED_GB * 1e9))
    for name, pays in (("never", None), ("at once", 0.0), ("rent or buy", 1.0)):
        kind = SegmentCache if pays is None else type("Paying", (Exact,), {"pays": pays})
        found = measured(trace, kind(MODEL, capacity - memory.total_bytes, memory), capacity)
        yield {"study": "exact", "workload": workload, "seed": seed, "order": name, "segments_gb": SHARED_GB, **found}


def tables(rows: list[dict[str, Any]]) -> str:
    """FLOPs saved in %, means over seeds, and documents that were kept."""
    lines = [_line(["workload", "no segments", "GB", *ORDERS, "endless", "kept, value", "recency", "of"])]
    lines.append(_line(["---"] * (len(ORDERS) + 7)))
    found: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["order"], row["segments_gb"]), []).append(row)

    def mean(workload: str, order: str, gb: float | None, column: str = "flop_hit_rate") -> float:
        return fmean(row[column] for row in found[workload, order, gb])

    for workload in WORKLOADS:
        for gb in SEGMENTS_GB:
            rates = [f"{100 * mean(workload, order, gb):.1f}" for order in ORDERS]
            ends = [f"{100 * mean(workload, name, at):.1f}" for name, at in (("no segments", 0.0), ("endless", None))]
            kept = [f"{mean(workload, order, gb, 'kept'):.1f}" for order in ("value", "recency")]
            marked = f"{mean(workload, 'value', gb, 'marked'):.1f}"
            lines.append(_line([f"`{workload}`", ends[0], f"{gb:g}", *rates, ends[1], *kept, marked]))
    names = ("never", "at once", "rent or buy")
    lines += ["", _line(["workload", *names]), _line(["---"] * 4)]
    for workload in SHARED:
        rates = [f"{100 * mean(workload, name, SHARED_GB):.1f}" for name in names]
        lines.append(_line([f"`{workload}`", *rates]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("run", "tables"), default="run")
    if parser.parse_args().what == "tables":
        print(tables(json.loads((provenance.ROOT / "benchmarks/sim/results/segments.json").read_text())["rows"]))
        return 0
    head, rows = provenance.head("numpy"), list[dict[str, Any]]()
    for make, workloads in ((memory_rows, WORKLOADS), (exact_rows, SHARED)):
        for workload in workloads:
            for seed in SEEDS:
                for row in make(workload, seed):
                    rows.append(row)
                    print(row, flush=True)
    shape = {"model": MODEL.name, "seeds": SEEDS, "capacity_gb": CAPACITY_GB, "seam_tokens": 8, "pass_tokens": 8192}
    scope = "simulated; no model is run; requests commit on arrival; 1 GB = 1e9 bytes; capacity enforced"
    print(provenance.write("sim", "segments", {**head, "scope": scope, **shape, "rows": rows}))
    print(tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
