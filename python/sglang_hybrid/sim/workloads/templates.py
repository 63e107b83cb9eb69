"""Single-turn workloads with shared beginnings: few-shot templates and retrieved documents."""

from collections.abc import Iterator

import numpy as np

from sglang_hybrid.sim.trace import Tokens, TraceRequest
from sglang_hybrid.sim.workloads.chat import MODEL_HEADER, USER_HEADER
from sglang_hybrid.sim.workloads.draw import Lengths, arrivals, text, zipf_choice

TEMPLATE = Lengths(1650, 0.6, 300, 8000)
QUESTION = Lengths(45, 0.6, 5, 800)
ONE_OFF = Lengths(760, 0.75, 50, 4000)
OUTPUT = Lengths(119, 0.77, 5, 2048)
DOCUMENT = Lengths(700, 0.5, 150, 3000)


def fewshot(
    rng: np.random.Generator,
    requests: int = 1500,
    rate: float = 2.0,
    templates: int = 24,
    exponent: float = 1.1,
    one_off: float = 0.25,
) -> Iterator[TraceRequest]:
    """Prompts = template (Zipf by popularity) + question; a share `one_off` of the requests has no template."""
    prompts = [text(rng, int(n)) for n in TEMPLATE.draw(rng, templates)]
    kinds = zipf_choice(rng, templates, exponent, requests)
    alone = rng.random(requests) < one_off
    questions, singles, outputs = (shape.draw(rng, requests) for shape in (QUESTION, ONE_OFF, OUTPUT))
    for i, ts in enumerate(arrivals(rng, requests, rate).tolist()):
        body = [text(rng, int(singles[i]))] if alone[i] else [prompts[kinds[i]], text(rng, int(questions[i]))]
        yield _single(rng, body, int(outputs[i]), ts, f"one-off {i}" if alone[i] else f"template {kinds[i]}")


def rag(
    rng: np.random.Generator,
    requests: int = 1500,
    rate: float = 2.0,
    documents: int = 300,
    exponent: float = 0.9,
    per_request: int = 4,
    system_tokens: int = 400,
) -> Iterator[TraceRequest]:
    """Prompts = system prompt + documents by rank of relevance + question: only leading documents are ever shared."""
    system = text(rng, system_tokens)
    corpus = [text(rng, int(n)) for n in DOCUMENT.draw(rng, documents)]
    topics = zipf_choice(rng, documents, exponent, requests)
    questions, outputs = QUESTION.draw(rng, requests), OUTPUT.draw(rng, requests)
    for i, ts in enumerate(arrivals(rng, requests, rate).tolist()):
        # Relevance: the topic's own document leads, its neighbours follow, now and then in another order.
        near = (topics[i] + np.arange(per_request)) % documents
        if rng.random() < 0.5:
            near[1:] = rng.permutation(near[1:])
        body = [system, *(corpus[d] for d in near), text(rng, int(questions[i]))]
        yield _single(rng, body, int(outputs[i]), ts, f"topic {topics[i]}")


def _single(rng: np.random.Generator, body: list[Tokens], n_output: int, ts: float, session: str) -> TraceRequest:
    tokens = np.concatenate([USER_HEADER, *body, MODEL_HEADER, text(rng, n_output)])
    tokens.flags.writeable = False
    return TraceRequest(tokens, len(tokens) - n_output - len(MODEL_HEADER), ts, session)
