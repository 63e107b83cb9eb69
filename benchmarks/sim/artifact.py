"""Run the published Marconi artifact on our traces, beside our policies.

The artifact is not part of this repository (CC BY-NC): clone github.com/ruipeterpan/marconi, check out the commit named
in the results and pass its folder. Rows: `artifact V1/V2/V3:ALPHA` as published, `... enforced` with its own eviction
called until the tree fits (published, it exceeds its capacity), and our policies of the same meaning.

    python -m benchmarks.sim.artifact DIR --workload sharegpt?seed=101 --capacity-gb 1,2 --json OUT
"""

import argparse
import contextlib
import io
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sim.run import about
from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim import Trace, open_cache, replay
from sglang_hybrid.sim.workloads import parse

MODEL = preset("marconi-7b")
PAIRS = (("V1", "lru"), ("V2", "marconi"), ("V3:0.0", "marconi:0"), ("V3:0.5", "marconi:0.5"), ("V3:1.0", "marconi:1"))
UNLIMITED_GB = 1000.0
_ABOUT = {"artifact": "github.com/ruipeterpan/marconi 0801661", "timer": "wall time"}
BOOTSTRAP = {"lmsys": 15}  # the artifact's own multipliers of the tuning window


def load(folder: Path) -> Any:
    """The artifact's tree class; its unused imports (scipy, transformers) are replaced by empty modules."""
    for name, members in (("scipy", ()), ("scipy.stats", ("rankdata",)), ("transformers", _UNUSED)):
        stub = types.ModuleType(name)
        for member in members:
            setattr(stub, member, None)
        sys.modules[name] = stub
    sys.path.insert(0, str(folder))
    import radix_cache_hybrid

    return radix_cache_hybrid.RadixCache


_UNUSED = ("AutoTokenizer", "AutoModelForCausalLM")


def run_artifact(tree_class: Any, trace: Trace, version: str, capacity: int, enforce: bool) -> dict[str, Any]:
    """Hits per request and how often the capacity was exceeded."""
    number, _, alpha = version[1:].partition(":")
    tree = tree_class(
        capacity_bytes=capacity,
        evict_policy_version=int(number),
        eff_weight=float(alpha or 0.0),
        bootstrap_multiplier=BOOTSTRAP.get(trace.name.partition("#")[0].partition(",")[0], 5),
    )
    over, worst, start = 0, 0.0, time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        for i, r in enumerate(trace.requests):
            tree.match_prefix(r.input_tokens.tolist())
            tree.insert(r.tokens.tolist(), state_at_leaf=i, state_at_branchoff=i)
            size = tree.get_tree_size()
            while enforce and size > capacity and tree.root_node.children:
                tree.evict(bytes_to_remove=size - capacity)
                size = tree.get_tree_size()
            over += size > capacity
            worst = max(worst, size / capacity)
    hits = np.array([h[2] for h in tree.request_history], dtype=np.int64)
    return {"hits": hits, "over": int(over), "worst": worst, "alpha": tree.eff_weight, "s": time.perf_counter() - start}


def compare(tree_class: Any, trace: Trace, gb: float, versions: list[str]) -> list[dict[str, Any]]:
    """Rows of one trace at one capacity."""
    capacity = round(gb * 1e9)
    total = trace.n_input_tokens
    rows = []
    for version, policy in PAIRS:
        if version not in versions:
            continue
        ours = replay(trace, open_cache(policy, capacity, MODEL), capacity)
        ours.check()
        for enforce in (False, True) if gb < UNLIMITED_GB else (False,):
            theirs = run_artifact(tree_class, trace, version, capacity, enforce)
            # The artifact reuses a whole prompt; a server must compute the last token, and we never count it.
            capped = np.minimum(theirs["hits"], np.array([r.n_input - 1 for r in trace.requests]))
            rows.append(
                {
                    "trace": trace.name,
                    "capacity_gb": gb,
                    "artifact": version + (" enforced" if enforce else ""),
                    "artifact_token_hit_rate": round(float(theirs["hits"].sum() / total), 6),
                    "artifact_alpha": theirs["alpha"],
                    "artifact_over_capacity_requests": theirs["over"],
                    "artifact_worst_fill": round(theirs["worst"], 4),
                    "artifact_seconds": round(theirs["s"], 2),
                    "policy": policy,
                    "token_hit_rate": round(float(ours.hit_tokens.sum() / total), 6),
                    "seconds": round(float((ours.lookup_s + ours.commit_s).sum()), 2),
                    "requests_with_equal_hits": round(float((capped == ours.hit_tokens).mean()), 4),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", action="append", required=True)
    parser.add_argument("--capacity-gb", default="1,2")
    parser.add_argument("--versions", default="V1,V2,V3:0.0,V3:0.5")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tree_class = load(args.folder)
    rows = []
    for text in args.workload:
        for gb in args.capacity_gb.split(","):
            rows += compare(tree_class, parse(text), float(gb), args.versions.split(","))
    if args.json:
        old = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**about("artifact"), **_ABOUT, "rows": old + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
