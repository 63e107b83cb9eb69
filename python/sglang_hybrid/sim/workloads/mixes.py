"""Workloads made of others: tenants side by side, phases one after another, conversations around documents."""

from collections.abc import Iterable, Iterator

import numpy as np

from sglang_hybrid.sim.trace import TraceRequest
from sglang_hybrid.sim.workloads.agents import agentic, swebench
from sglang_hybrid.sim.workloads.chat import sharegpt
from sglang_hybrid.sim.workloads.draw import Lengths, text
from sglang_hybrid.sim.workloads.templates import fewshot

SYSTEM_PROMPTS = 3


def mixed(rng: np.random.Generator, sessions: int = 50, sps: float = 0.5) -> Iterator[TraceRequest]:
    """Three tenants at once: appending agents, short chats and few-shot templates."""
    duration_s = sessions / sps + 150.0
    rate = 8.0 * sps
    yield from _named("agents", agentic(rng, sessions, sps))
    yield from _named("chat", sharegpt(rng, sessions, sps))
    yield from _named("templates", fewshot(rng, int(rate * duration_s), rate))


def phases(
    rng: np.random.Generator, sessions: int = 50, sps: float = 1.0, pause_s: float = 5.0
) -> Iterator[TraceRequest]:
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
            yield TraceRequest(r.tokens, r.n_input, ts, r.session, r.turn)
        start = last + pause_s


def turnover(
    rng: np.random.Generator,
    sessions: int = 80,
    turns: int = 5,
    documents: int = 8,
    questions: int = 4,
    cycles: int = 2,
    rate: float = 4.0,
    system_tokens: int = 400,
    message_tokens: int = 80,
    output_tokens: int = 150,
    document_tokens: int = 6000,
) -> Iterator[TraceRequest]:
    """Conversations, questions about a few long documents, then other conversations, `cycles` times.

    In each round every session (or document) is asked once, in another order. What a phase used never comes back, but
    for three system prompts of the conversations, however often it was used.
    """
    systems = [text(rng, system_tokens) for _ in range(SYSTEM_PROMPTS)]
    message, output = (Lengths(median, 0.5) for median in (message_tokens, output_tokens))
    clock = 0.0
    for phase in range(2 * cycles + 1):
        chats = phase % 2 == 0
        kind, rounds, kinds = ("chat", turns, sessions) if chats else ("document", questions, documents)
        tokens = [
            systems[int(rng.integers(SYSTEM_PROMPTS))] if chats else text(rng, document_tokens) for _ in range(kinds)
        ]
        for turn in range(rounds):
            for i in rng.permutation(kinds).tolist():
                clock += float(rng.exponential(1.0 / rate))
                asked = np.concatenate([tokens[i], text(rng, int(message.draw(rng, 1)[0]))])
                answered = np.concatenate([asked, text(rng, int(output.draw(rng, 1)[0]))])
                if chats:
                    tokens[i] = answered
                yield TraceRequest(answered, len(asked), clock, f"{kind} {phase} {i}", turn)


def _named(tenant: str, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    for r in requests:
        yield TraceRequest(r.tokens, r.n_input, r.ts, f"{tenant} {r.session}", r.turn)
