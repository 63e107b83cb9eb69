"""What the cache costs the scheduler: match, insert and evict over SGLang's real tree and pools, by number of leaves.

    python benchmarks/serving/cache_calls.py [--leaves 100 1000 10000 40000]

Ours (forecast) beside both cores of stock SGLang, each in a process of its own, without a model. A request is one match
of a known prefix, one insertion of a new leaf with a state, and the evictions that make room for it: one state and its
KV. Wall-clock microseconds of one thread.
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


def measure(kind: str, leaves: int, requests: int) -> dict[str, Any]:
    """Fill a tree with `leaves` and time `requests` on it; in this process."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = KINDS[kind][1]
    from tree import Tree

    rng = random.Random(1)
    tokens = leaves * OWN + (leaves // 100 + 2) * SHARED + 64
    tree = Tree(KINDS[kind][0], tokens=tokens, states=leaves + 2)
    sequences = []

    def fresh(number: int) -> list[int]:
        return [1000 + number // 100] * SHARED + [rng.randrange(1 << 20) for _ in range(OWN)]

    for number in range(leaves):
        tree.clock.advance(0.1)
        sequences.append(fresh(number))
        tree.insert(sequences[-1])
    times: dict[str, list[float]] = {"match": [], "evict": [], "insert": [], "request": []}
    for number in range(requests):
        tree.clock.advance(0.1)
        known, new = rng.choice(sequences), fresh(rng.randrange(leaves))
        begin = time.perf_counter()
        tree.match(known)
        matched = time.perf_counter()
        tree.evict(0, 1)
        tree.evict(OWN, 0)
        evicted = time.perf_counter()
        tree.insert(new)
        end = time.perf_counter()
        for name, span in zip(times, (matched - begin, evicted - matched, end - evicted, end - begin), strict=True):
            times[name].append(1e6 * span)
        sequences[number % leaves] = new
    return {name: {"p50_us": statistics.median(spans), "p99_us": sorted(spans)[int(0.99 * len(spans))]}
            for name, spans in times.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 1000, 10_000, 40_000])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--one", choices=list(KINDS), help="measure one kind and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.leaves[0], options.requests)))
        return
    import provenance

    rows = []
    for leaves in options.leaves:
        for kind in KINDS:
            command = [sys.executable, __file__, "--one", kind, "--leaves", str(leaves)]
            command += ["--requests", str(options.requests)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"kind": kind, "leaves": leaves, **json.loads(done.stdout.splitlines()[-1])})
            print(kind, leaves, {k: round(v["p50_us"]) for k, v in rows[-1].items() if isinstance(v, dict)}, flush=True)
    head = provenance.head("sglang", "torch", "sglang-hybrid")
    print(provenance.write("serving", "cache-calls", {**head, "seed": 1, "requests": options.requests, "rows": rows}))


if __name__ == "__main__":
    main()
