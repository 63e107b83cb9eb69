"""What the cache costs the scheduler: match, insert and evict over SGLang's real tree and pools, by number of leaves.

    python benchmarks/serving/cache_calls.py [--leaves 100 1000 10000 40000]

Ours (forecast) beside both cores of stock SGLang, without a model, in one process that takes turns request by request.
A request is one match of a known prefix, one insertion of a new leaf with a state, and the evictions that make room for
it: one state and its KV. Wall-clock microseconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "engine"))
sys.path.insert(0, str(ROOT / "benchmarks"))

KINDS = {"hybrid": ("forecast", "python"), "stock python": (None, "python"), "stock rust": (None, "rust")}
SHARED, OWN = 24, 8
"""Tokens of a prefix that a hundred leaves share, and of a leaf."""


class Load:
    """One kind of cache with its tree full, and the same requests for every kind."""

    def __init__(self, kind: str, leaves: int) -> None:
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = KINDS[kind][1]
        from tree import Tree

        self.rng = random.Random(1)
        tokens = leaves * OWN + (leaves // 100 + 2) * SHARED + 64
        self.tree = Tree(KINDS[kind][0], tokens=tokens, states=leaves + 2)
        self.sequences: list[list[int]] = []
        for number in range(leaves):
            self.tree.clock.advance(0.1)
            self.sequences.append(self.fresh(number))
            self.tree.insert(self.sequences[-1])
        self.times: dict[str, list[float]] = {"match": [], "evict": [], "insert": [], "request": []}

    def fresh(self, number: int) -> list[int]:
        return [1000 + number // 100] * SHARED + [self.rng.randrange(1 << 20) for _ in range(OWN)]

    def request(self, number: int) -> None:
        tree, leaves = self.tree, len(self.sequences)
        tree.clock.advance(0.1)
        known, new = self.rng.choice(self.sequences), self.fresh(self.rng.randrange(leaves))
        begin = time.perf_counter()
        tree.match(known)
        matched = time.perf_counter()
        tree.evict(0, 1)
        tree.evict(OWN, 0)
        evicted = time.perf_counter()
        tree.insert(new)
        end = time.perf_counter()
        spans = (matched - begin, evicted - matched, end - evicted, end - begin)
        for name, span in zip(self.times, spans, strict=True):
            self.times[name].append(1e6 * span)
        self.sequences[number % leaves] = new


def measure(leaves: int, requests: int) -> list[dict[str, Any]]:
    """Median and 99th percentile of every kind of cache on trees of `leaves`; in this process."""
    loads = {kind: Load(kind, leaves) for kind in KINDS}
    for number in range(requests):
        for load in loads.values():
            load.request(number)
    rows = []
    for kind, load in loads.items():
        spans = {
            name: {"p50_us": statistics.median(times), "p99_us": sorted(times)[int(0.99 * len(times))]}
            for name, times in load.times.items()
        }
        rows.append({"kind": kind, "leaves": leaves, **spans})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 1000, 10_000, 40_000])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--one", action="store_true", help="measure the first number of leaves here and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.leaves[0], options.requests)))
        return
    import provenance

    rows = []
    for leaves in options.leaves:
        command = [sys.executable, __file__, "--one", "--leaves", str(leaves), "--requests", str(options.requests)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
        for row in rows[-len(KINDS) :]:
            print(
                row["kind"], leaves, {k: round(v["p50_us"]) for k, v in row.items() if isinstance(v, dict)}, flush=True
            )
    head = provenance.head("sglang", "torch", "sglang-hybrid")
    print(provenance.write("serving", "cache-calls", {**head, "seed": 1, "requests": options.requests, "rows": rows}))


if __name__ == "__main__":
    main()
