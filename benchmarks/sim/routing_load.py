"""Sessions for a fleet of simulated servers, and how fast they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim.fleet import FleetShape, Turn, sessions
from sglang_hybrid.sim.shape import Shape
from sglang_hybrid.sim.trace import TraceRequest, make_trace
from sglang_hybrid.sim.workloads.draw import Lengths, text, turns, zipf_choice

MODEL = preset("qwen3-next-80b-a3b")
SERVER = Shape(states=61, kv_tokens=214_158)
"""What SGLang makes of 10 GB for this model."""
WARM, SLOWER = 0.25, 5.0
"""The first quarter of the sessions comes five times as slowly and is not counted: caches begin empty."""
REQUESTS = {2: 600, 4: 800, 8: 1000, 16: 1600, 64: 2880}  # by servers


@dataclass(frozen=True)
class Work:
    """Sessions of `turns` on average that begin with one of `kinds` heads (0: each with its own), by Zipf.

    With `per_server` there are so many kinds for each server. `at_once` sessions begin together, with one head.
    """

    kinds: int
    exponent: float
    head: Lengths
    turns: float
    asked: Lengths
    answer: Lengths
    pause_s: float
    per_server: bool = False
    at_once: int = 1


DOCUMENTS = Work(8, 0.8, Lengths(6000, 0.4, 1500, 16_000), 1, Lengths(60, 0.6, 5), Lengths(100, 0.7, 5), 0.0, True)
WORKS = {
    "agents": Work(40, 1.0, Lengths(2500, 0.4, 500, 8000), 6, Lengths(300, 0.9, 10), Lengths(80, 0.6, 5), 2.0),
    "documents": DOCUMENTS,
    "hot documents": replace(DOCUMENTS, exponent=1.4),
    "chats": Work(1, 1.0, Lengths(300, 0.1), 6, Lengths(300, 1.0, 10), Lengths(200, 0.8, 10), 3.0),
    "fan-outs": replace(DOCUMENTS, kinds=0, at_once=8, asked=Lengths(300, 0.9, 10)),
    "nothing shared": replace(DOCUMENTS, kinds=0),
}
LOADS = {  # two each
    "agents": (2.0, 4.0),
    "documents": (2.0, 4.0),
    "hot documents": (2.0, 4.0),
    "chats": (1.0, 1.5),
    "fan-outs": (0.6, 1.0),
    "nothing shared": (0.6, 0.9),
}


def drawn(work: Work, servers: int, count: int, rng: np.random.Generator) -> Iterator[TraceRequest]:
    """`count` sessions, the k-th from second k on."""
    kinds = work.kinds * (servers if work.per_server else 1)
    heads = [text(rng, int(n)) for n in work.head.draw(rng, kinds or count)]
    chosen = zipf_choice(rng, kinds, work.exponent, count) if kinds else np.arange(count) // work.at_once
    lengths = turns(rng, count, 1, work.turns, 30) if work.turns > 1 else np.ones(count, int)
    for session, (kind, n) in enumerate(zip(chosen.tolist(), lengths.tolist(), strict=True)):
        asked, answer = work.asked.draw(rng, n), work.answer.draw(rng, n)
        parts = [heads[kind], text(rng, int(asked.sum() + answer.sum()))]
        tokens = np.concatenate(parts)
        tokens.flags.writeable = False
        ends = len(heads[kind]) + np.cumsum(np.stack([asked, answer], axis=1).reshape(-1)).reshape(n, 2)
        starts = session + np.concatenate([[0.0], np.cumsum(rng.exponential(max(work.pause_s, 1e-9), n - 1))])
        for turn, (n_input, end) in enumerate(ends.tolist()):
            yield TraceRequest(tokens[:end], n_input, float(starts[turn]), str(session), turn)


@cache
def load_of(name: str, servers: int, seed: int) -> tuple[list[list[Turn]], np.ndarray, float]:
    """Sessions, when they begin at one a second, and the prompt tokens of a session on average."""
    work = WORKS[name]
    rng = np.random.default_rng([11, seed, servers, list(WORKS).index(name)])
    count = round(REQUESTS[servers] / work.turns)
    found = sessions(make_trace(name, drawn(work, servers, count, rng)), FleetShape(MODEL, SERVER, servers))
    tokens = float(np.mean([sum(turn.request.n_input for turn in session) for session in found]))
    gaps = rng.exponential(1.0, len(found))
    gaps[np.arange(len(gaps)) % work.at_once > 0] = 0.0
    gaps *= work.at_once
    gaps[: int(WARM * len(gaps))] *= SLOWER
    return found, np.cumsum(gaps), tokens
