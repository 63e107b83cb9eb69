"""Which places of an agent's prompts are worth declaring without being asked: what each brings, simulated.

    python -m benchmarks.sim.sites [--sessions 120] [--seeds 301,302,303]     # results/sites.json

Agents of some kinds, by Zipf: all sessions of a kind begin with the same tools, then comes a system text of the user,
then a task and steps that append tool calls and results. `thoughts`: a step's answer begins with tokens that the next
prompt leaves out, as templates of reasoning models do. Places: the end of the tools, of the system text (the first
message), of the last message. `clairvoyant` and the unmarked row are the ceilings and the baseline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import numpy as np

from benchmarks import provenance
from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim.cache import open_server
from sglang_hybrid.sim.ceilings import Clairvoyant
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.trace import Trace, TraceRequest, make_trace
from sglang_hybrid.sim.workloads.draw import Lengths, arrivals, text, turns, zipf_choice

MODEL = preset("qwen3-next-80b-a3b")
KINDS, EXPONENT, RATE, STEP_S = 40, 0.8, 0.5, 6.0
TOOLS, SYSTEM = Lengths(2500, 0.4, 500, 8000), Lengths(150, 0.5, 30, 600)
TASK, RESULT, CALL, THOUGHTS = Lengths(300, 0.7), Lengths(250, 1.0), Lengths(60, 0.6), Lengths(200, 0.7)
END, OPENING = 7, np.array([5, 6, 9], np.int32)  # of a message; of an answer
PLACES = ("tools", "system", "last")
SETS: tuple[tuple[str, ...], ...] = ((), ("tools",), ("system",), ("last",), ("system", "last"), PLACES)


def agents(rng: np.random.Generator, sessions: int, thoughts: bool) -> Iterator[tuple[TraceRequest, dict[str, int]]]:
    """Requests with the position of every place."""
    tools = [text(rng, int(n)) for n in TOOLS.draw(rng, KINDS)]
    kinds, begins = zipf_choice(rng, KINDS, EXPONENT, sessions), arrivals(rng, sessions, RATE)
    for session, (kind, now) in enumerate(zip(kinds, begins, strict=True)):
        steps = int(turns(rng, 1, 2, 8.0, 30)[0])
        sizes = {name: of.draw(rng, steps) for name, of in (("asked", RESULT), ("call", CALL), ("thoughts", THOUGHTS))}
        sizes["asked"][0] = TASK.draw(rng, 1)[0]
        so_far = np.concatenate([tools[kind], text(rng, int(SYSTEM.draw(rng, 1)[0])), [END]]).astype(np.int32)
        ends = {"tools": len(tools[kind]), "system": len(so_far)}
        for step in range(steps):
            body = np.concatenate([so_far, text(rng, int(sizes["asked"][step])), [END]]).astype(np.int32)
            thought = text(rng, int(sizes["thoughts"][step]))
            call = np.concatenate([text(rng, int(sizes["call"][step])), [END]]).astype(np.int32)
            opening = OPENING if thoughts else OPENING[:2]
            answer = np.concatenate([thought, call]) if thoughts else call
            tokens = np.concatenate([body, opening, answer]).astype(np.int32)
            tokens.flags.writeable = False
            request = TraceRequest(tokens, len(body) + len(opening), float(now) + step * STEP_S, str(session), step)
            yield request, {**ends, "last": len(body)}
            so_far = np.concatenate([body, OPENING[:2], call]).astype(np.int32)


def declared(found: list[tuple[TraceRequest, dict[str, int]]], places: tuple[str, ...]) -> Trace:
    """The trace whose requests declare `places`."""
    return make_trace("agents", [replace(r, boundaries=tuple(sorted({at[p] for p in places}))) for r, at in found])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=120)
    parser.add_argument("--seeds", default="301,302,303")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    rows = []
    for thoughts in (False, True):
        traces = [list(agents(np.random.default_rng([7, seed]), given.sessions, thoughts)) for seed in seeds]
        for gigabytes in (1.0, 3.0, 30.0):
            row = {"thoughts": thoughts, "capacity_gb": gigabytes}
            for places in SETS:
                rates = []
                for found in traces:
                    trace = declared(found, places)
                    cache = open_server("forecast", round(gigabytes * 1e9), MODEL)
                    hits = replay(trace, cache, round(gigabytes * 1e9)).hit_tokens
                    rates.append(float(hits.sum() / trace.n_input_tokens))
                row[" ".join(places) or "nothing"] = round(fmean(rates), 4)
            best = [declared(found, ()) for found in traces]
            row["clairvoyant"] = round(fmean(ceiling(trace, gigabytes) for trace in best), 4)
            rows.append(row)
            print(row, flush=True)
    shape = {"model": MODEL.name, "sessions": given.sessions, "seeds": seeds, "kinds": KINDS}
    print(provenance.write("sim", "sites", {**provenance.head("numpy"), **shape, "rows": rows}))
    return 0


def ceiling(trace: Trace, gigabytes: float) -> float:
    return float(Clairvoyant(ReuseIndex(trace), round(gigabytes * 1e9), MODEL).hits().sum() / trace.n_input_tokens)


if __name__ == "__main__":
    sys.exit(main())
