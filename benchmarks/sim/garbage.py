"""What a full history costs Python's garbage collector: the pause of one full collection, and resident memory.

    python -m benchmarks.sim.garbage --marks 400000

After `scripts/compile --remove` it measures the interpreted form. `empty` is the same process before the history is
filled: what was imported. A collection stops the scheduler for that long, whenever Python decides to make one.
"""

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import head, write
from sglang_hybrid.prefix import FORM
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.history import History
from sglang_hybrid.prefix.reuse.table import ReuseTable

SHARED_TOKENS, NEW_TOKENS = 60, 40


def measured(repeats: int) -> dict[str, Any]:
    """Milliseconds of full collections, their lowest and median; objects they walk over; resident megabytes."""
    pauses = []
    for _ in range(repeats):
        start = time.perf_counter()
        gc.collect()
        pauses.append(1e3 * (time.perf_counter() - start))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    return {
        "collect_ms": round(min(pauses), 2),
        "collect_ms_median": round(float(np.median(pauses)), 2),
        "objects": len(gc.get_objects()),
        "resident_mb": round(resident, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--marks", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    rng = np.random.default_rng(1)
    gc.collect()
    empty = measured(given.repeats)
    history, requests = History(ReuseTable(PRIORS), max_marks=given.marks), 0
    shared = rng.integers(0, 30_000, SHARED_TOKENS).astype(np.int32)
    while history.tree.states < given.marks - 2:
        new = rng.integers(0, 30_000, NEW_TOKENS).astype(np.int32)
        tokens = np.concatenate((shared[: rng.integers(10, SHARED_TOKENS)], new))
        history.observe(tokens, tokens.size, float(requests))
        requests += 1
    rows = {"empty": empty, "full": measured(given.repeats)}
    print(FORM, rows)
    form = FORM.split(":")[0]
    write("sim", f"garbage-{form}", {**head("numpy"), "form": FORM, "marks": given.marks, "requests": requests, **rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
