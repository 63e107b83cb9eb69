"""What a routing policy brings to simulated servers: hits, seconds to the first token, promises that were false.

    python -m benchmarks.sim.routing                 # results/routing.json: policies, held-out seeds
    python -m benchmarks.sim.routing constants       # results/routing-constants.json: variants of ours, seeds 1 and 2
    python -m benchmarks.sim.routing tables          # of both

Sessions begin as a Poisson process, their beginnings are drawn by Zipf, the turns follow a pause after the answer
(`sglang_hybrid/sim/fleet.py`). `load`: prompt tokens that come per second, over those that all servers could compute;
above 1 the servers keep up with the help of their caches alone. Rows `one_server` are no policy: a single server with
the memory of all and no queue, whose hit rate is what the others are measured by (no strict bound: it evicts too).
`restart_points exact` hears of events at once and knows what is left of every queue.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import provenance
from benchmarks.sim.routing_load import LOADS, MODEL, REQUESTS, SERVER, WARM, load_of
from benchmarks.sim.tables import result
from sglang_hybrid.routing.index import Reach
from sglang_hybrid.routing.policies import Offer, Prompt, RestartPoints, Row
from sglang_hybrid.sim.fleet import Failure, Fleet, FleetShape
from sglang_hybrid.sim.shape import Shape

SERVERS = dict.fromkeys(LOADS, (2, 4, 16, 64)) | {"documents": (4, 16), "fan-outs": (4, 16), "nothing shared": (16,)}
LAG_S = 0.05
COMPARED = ("least_load", "text", "kv_events", "restart_points")
POLICY_ROWS = ("one_server", "round_robin", *COMPARED, "restart_points exact")


def cell(
    name: str, servers: int, policy: str | Row, seed: int, load: float, fails: bool = False, **more: Any
) -> dict[str, Any]:
    """One run; `more` goes to the fleet's shape."""
    shape = FleetShape(MODEL, SERVER, servers, **more)
    found, starts, tokens = load_of(name, servers, seed)
    starts = starts * tokens / (load * servers * shape.prefill_tokens_per_s)
    span, warm = float(starts[-1]), float(starts[int(WARM * len(starts))])
    if policy == "one_server":
        whole = Shape(states=SERVER.states * servers, kv_tokens=SERVER.kv_tokens * servers)
        shape = replace(shape, shape=whole, servers=1, prefill_tokens_per_s=1e12, overhead_s=0.0)
        policy = "round_robin"
    failures = []
    if fails:  # each server about once in the run, one after the other
        counted_s = span - warm
        failures = [
            Failure(warm + counted_s * (k + 0.5) / servers, k, 0.5 * counted_s / servers) for k in range(servers)
        ]
    fleet = Fleet(shape, policy)
    fleet.play(found, starts.tolist(), failures)
    counted = [s for s in fleet.served if warm <= s.came_s <= span]
    ttft = np.array([s.first_token_s - s.came_s for s in counted])
    prompt = sum(s.prompt_tokens for s in counted)
    busy = [server.busy_s for server in fleet.servers]
    return {
        "requests": len(counted),
        "token_hit_rate": round(sum(s.hit_tokens for s in counted) / prompt, 4),
        "ttft_ms": [round(1e3 * float(np.percentile(ttft, q))) for q in (50, 95)],
        "mean_ms": round(1e3 * float(ttft.mean())),
        "false_promises": round(sum(max(0, s.promised_tokens - s.hit_tokens) for s in counted) / prompt, 4),
        "imbalance": round(max(busy) / (sum(busy) / len(busy)), 3),
        "sent_again": sum(s.sent > 1 for s in counted),
        "broken": sum(s.broken for s in counted),
    }


def cells() -> Iterator[dict[str, Any]]:
    """What is run: all policies by servers, then higher loads, lags and failures at 16 servers."""
    for name, (low, high) in LOADS.items():
        for servers in SERVERS[name]:
            for policy in POLICY_ROWS:
                yield {"name": name, "servers": servers, "policy": policy, "load": low, "lag_s": LAG_S}
        for policy in COMPARED:
            yield {"name": name, "servers": 16, "policy": policy, "load": high, "lag_s": LAG_S}
    for name in ("agents", "documents"):
        low = LOADS[name][0]
        for lag in (0.0, 0.2, 0.5):
            for policy in ("kv_events", "restart_points"):
                yield {"name": name, "servers": 16, "policy": policy, "load": low, "lag_s": lag}
        for policy in COMPARED:
            yield {"name": name, "servers": 16, "policy": policy, "load": low, "lag_s": LAG_S, "fails": True}


class AsOffered(RestartPoints):
    """What is on its way makes no prompt that waits shorter."""

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        chosen = super().choose(prompt, offers)
        self.left_tokens = prompt.tokens - offers[chosen].reach.resume_tokens
        return chosen


class NoBlocks(RestartPoints):
    """KV beyond a state counts for nothing."""

    def choose(self, prompt: Prompt, offers: Mapping[str, Offer]) -> str:
        resumes = {name: offer.reach.resume_tokens for name, offer in offers.items()}
        return super().choose(
            prompt, {name: offer._replace(reach=Reach(resumes[name], resumes[name])) for name, offer in offers.items()}
        )


def variants() -> dict[str, Row]:
    """Ours, with one thing changed."""
    changed = [("REQUEST_TOKENS", n) for n in (0, 128, 256, 1024)] + [("LIFE_S", n) for n in (0, 2, 30)]
    changed += [("FULL_TOKENS", n) for n in (0, 2048, 32768, 10**9)]
    classes = {f"{key} {value}": type("Variant", (RestartPoints,), {key: value}) for key, value in changed}
    classes |= {"as chosen": RestartPoints, "waits as offered": AsOffered, "no blocks": NoBlocks}
    return {name: Row(made, blocks=True, states=True) for name, made in classes.items()}


def constants() -> Iterator[dict[str, Any]]:
    """Variants of ours at the higher load of every workload in which something is shared; of what a full server costs
    on more servers, too."""
    for name, (low, load) in LOADS.items():
        for variant in variants() if name != "nothing shared" else ():
            yield {"name": name, "servers": 8, "policy": variant, "load": load, "lag_s": 0.2}
            if variant.startswith(("FULL", "as")) and 64 in SERVERS[name]:
                yield {"name": name, "servers": 64, "policy": variant, "load": low, "lag_s": 0.2}


def table(name: str) -> Iterator[str]:
    """Markdown of a result: hits in % and the 95th percentile of the time to the first token in ms, over the seeds."""
    found: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in result(name)["rows"]:
        key = row["name"], row["servers"], row["load"], f"{1000 * row['lag_s']:g}", "yes" if "fails" in row else ""
        found.setdefault(key, {}).setdefault(row["policy"], []).append(row)
    policies = list(dict.fromkeys(policy for row in found.values() for policy in row))
    yield f"| workload | servers | load | lag ms | failures | {' | '.join(policies)} |"
    yield "|---" * (5 + len(policies)) + "|"
    for key, by in sorted(found.items()):
        columns = []
        for policy in policies:
            rows = by.get(policy, [])
            numbers = [f"{fmean(100 * row['token_hit_rate'] for row in rows):.0f}"] if rows else []
            if rows and policy != "one_server":
                numbers.append(f"{fmean(row['ttft_ms'][1] for row in rows):.0f}")
            columns.append(", ".join(numbers))
        yield f"| {' | '.join(map(str, key))} | {' | '.join(columns)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["policies", "constants", "tables"], default="policies")
    given = parser.parse_args()
    if given.what == "tables":
        print("\n".join([*table("routing"), "", *table("routing-constants")]))
        return 0
    ours = given.what == "constants"
    head, rows, made = provenance.head("numpy"), [], variants()
    for about in sorted(constants() if ours else cells(), key=lambda about: about["servers"]):
        for seed in (1, 2) if ours else (401, 402):
            asked = dict(about)
            policy, exact = str(asked.pop("policy")), False
            if policy == "restart_points exact":
                policy, exact, asked["lag_s"] = "restart_points", True, 0.0
            row = cell(policy=made.get(policy, policy), seed=seed, exact=exact, **asked)
            rows.append({**about, "seed": seed, **row})
            print(rows[-1], flush=True)
    shape = {"model": MODEL.name, "states": SERVER.states, "kv_tokens": SERVER.kv_tokens, "requests": REQUESTS}
    name = "routing-constants" if ours else "routing"
    print(provenance.write("sim", name, {**head, **shape, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
