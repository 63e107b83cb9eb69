"""Workloads made of others: tenants side by side, and phases one after another."""

from collections.abc import Iterable, Iterator

import numpy as np

from sglang_hybrid.sim.trace import Request
from sglang_hybrid.sim.workloads.agents import agentic, swebench
from sglang_hybrid.sim.workloads.chat import sharegpt
from sglang_hybrid.sim.workloads.templates import fewshot


def mixed(rng: np.random.Generator, sessions: int = 50, sps: float = 0.5) -> Iterator[Request]:
    """Three tenants at once: appending agents, short chats and few-shot templates."""
    duration_s = sessions / sps + 150.0
    rate = 8.0 * sps
    yield from _named("agents", agentic(rng, sessions, sps))
    yield from _named("chat", sharegpt(rng, sessions, sps))
    yield from _named("templates", fewshot(rng, int(rate * duration_s), rate))


def phases(rng: np.random.Generator, sessions: int = 50, sps: float = 1.0, pause_s: float = 5.0) -> Iterator[Request]:
    """Short chats, then rewriting agents, then few-shot templates: what was learned before is wrong afterwards."""
    start = 0.0
    for name, part in (
        ("chat", sharegpt(rng, sessions, sps)),
        ("agents", swebench(rng, sessions, sps)),
        ("templates", fewshot(rng, 15 * sessions)),
    ):
        last = start
        for r in _named(name, part):
            ts = start + r.ts
            last = max(last, ts)
            yield Request(r.tokens, r.n_input, ts, r.session, r.turn)
        start = last + pause_s


def _named(tenant: str, requests: Iterable[Request]) -> Iterator[Request]:
    for r in requests:
        yield Request(r.tokens, r.n_input, r.ts, f"{tenant} {r.session}", r.turn)
