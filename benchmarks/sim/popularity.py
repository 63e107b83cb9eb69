"""What no policy can skip of few-shot requests that does not know which template comes next.

    python -m benchmarks.sim.popularity     # results/popularity.json

The workload draws its templates independently, so the past says nothing about the next request but how popular each
template is. A policy that knows every popularity from the start therefore expects to skip, of each request, at most the
best fractional knapsack of the templates that came before: popularity times tokens for KV and one state. The rows set
that beside the `main` results: the proof that a ratio to Marconi above it cannot be reached by better forecasts.
It is an expectation: on one trace a policy can be lucky.
"""

from __future__ import annotations

import inspect
import zlib
from statistics import fmean

import numpy as np

from benchmarks import provenance
from benchmarks.sim.grids import CAPACITIES, HELD_OUT_SEEDS
from benchmarks.sim.tables import result
from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim.trace import Trace
from sglang_hybrid.sim.workloads import parse
from sglang_hybrid.sim.workloads.chat import USER_HEADER
from sglang_hybrid.sim.workloads.draw import zipf
from sglang_hybrid.sim.workloads.templates import TEMPLATE, fewshot

SHAPE = {name: given.default for name, given in inspect.signature(fewshot).parameters.items()}
MODEL = preset("marconi-7b")


def expected_tokens(seen: frozenset[int], tokens: np.ndarray, popularity: np.ndarray, capacity_bytes: float) -> float:
    """Tokens that the best content of the cache skips of the next request, on average: whole or parts of `seen`."""
    size_bytes = tokens * MODEL.kv_bytes_per_token + MODEL.checkpoint_bytes
    left_bytes, skipped = capacity_bytes, 0.0
    for template in np.argsort(-popularity * tokens / size_bytes).tolist():
        if template in seen and left_bytes > 0:
            share = min(1.0, left_bytes / size_bytes[template])
            skipped += share * popularity[template] * tokens[template]
            left_bytes -= share * size_bytes[template]
    return skipped


def bound(trace: Trace, seed: int, capacity_gb: float) -> float:
    """Token hit rate that no policy without foreknowledge exceeds in expectation."""
    rng = np.random.default_rng([zlib.crc32(b"fewshot"), seed])
    tokens = TEMPLATE.draw(rng, SHAPE["templates"]) + len(USER_HEADER)  # the first that the workload draws
    popularity = (1.0 - SHAPE["one_off"]) * zipf(SHAPE["templates"], SHAPE["exponent"])
    known: dict[frozenset[int], float] = {}
    seen, skipped = frozenset[int](), 0.0
    for request in trace.requests:
        if seen not in known:
            known[seen] = expected_tokens(seen, tokens, popularity, capacity_gb * 1e9)
        skipped += known[seen] + len(USER_HEADER)  # the header is everybody's, and free here
        kind, _, number = request.session.partition(" ")
        if kind == "template":
            seen |= {int(number)}
    return skipped / trace.n_input_tokens


def main() -> None:
    provenance.no_arguments(__doc__)
    rates = {(r["trace"], r["capacity_gb"], r["policy"]): r["token_hit_rate"] for r in result("main")["rows"]}
    rows = []
    for seed in HELD_OUT_SEEDS:
        trace = parse(f"fewshot?seed={seed}")
        for gb in CAPACITIES["fewshot"]:
            row = {"trace": f"fewshot#{seed}", "capacity_gb": gb, "no_foreknowledge": bound(trace, seed, gb)}
            row |= {policy: rates[f"fewshot#{seed}", gb, policy] for policy in ("marconi-paper", "marconi", "forecast")}
            rows.append(row)
    for policy in ("marconi-paper", "marconi"):
        ratios = [fmean(row[name] / row[policy] for row in rows) for name in ("no_foreknowledge", "forecast")]
        print(f"to {policy}: at most {ratios[0]:.2f} without foreknowledge, forecast {ratios[1]:.2f}")
    print(provenance.write("sim", "popularity", {**provenance.head("numpy"), "rows": rows}))


if __name__ == "__main__":
    main()
