"""Workloads whose prompts bring the same texts in fresh orders: retrieved documents, an agent's tools and skills.

Requests mark these texts as segments. A prefix cache alone finds what comes before the first of them, and the
conversation itself when it goes on.
"""

from collections.abc import Iterator

import numpy as np

from sglang_hybrid.sim.trace import Segment, Tokens, TraceRequest
from sglang_hybrid.sim.workloads.agents import AGENTIC_OBSERVATION, AGENTIC_TASK, OUTPUT
from sglang_hybrid.sim.workloads.chat import MODEL_HEADER, USER_HEADER
from sglang_hybrid.sim.workloads.draw import CONTEXT_TOKENS, Lengths, arrivals, text, tool_gaps, turns, zipf
from sglang_hybrid.sim.workloads.templates import OUTPUT as ANSWER
from sglang_hybrid.sim.workloads.templates import QUESTION

LEAST_TOKENS = 128
MEAN_STEPS, MOST_STEPS = 8.0, 30
SPREAD = 0.5  # shape of the lengths of documents
PAUSE_S = 30.0  # mean time until a follow-up


class _Conversation:
    """Prompt and answers of a session as they grow, and where its segments lie."""

    def __init__(self) -> None:
        self._pieces: list[Tokens] = []
        self._segments: list[Segment] = []
        self.size = 0

    def add(self, *texts: Tokens, marked: bool = False) -> None:
        for tokens in texts:
            if marked:
                self._segments.append(Segment(self.size, self.size + len(tokens)))
            self._pieces.append(tokens)
            self.size += len(tokens)

    def ask(self, answer: Tokens, ts: float, session: str, turn: int) -> TraceRequest:
        """A request of all that is there, which is answered."""
        self.add(MODEL_HEADER)
        n_input = self.size
        self.add(answer)
        self._pieces = [np.concatenate(self._pieces)]
        self._pieces[0].flags.writeable = False
        return TraceRequest(self._pieces[0], n_input, ts, session, turn, segments=tuple(self._segments))


def documents(
    rng: np.random.Generator,
    requests: int = 600,
    rate: float = 2.0,
    documents: int = 200,
    exponent: float = 0.9,
    per_request: int = 8,
    document_tokens: int = 1000,
    system_tokens: int = 400,
    again: float = 0.25,
    fixed: int = 0,
) -> Iterator[TraceRequest]:
    """Questions about `per_request` documents, by popularity and in fresh order, behind one system prompt.

    After an answer a further question comes with chance `again`. The first `fixed` documents are the same ones, in the
    same order, in every prompt.
    """
    system = text(rng, system_tokens)
    lengths = Lengths(document_tokens, SPREAD, LEAST_TOKENS, CONTEXT_TOKENS // 4)
    corpus = [text(rng, int(n)) for n in lengths.draw(rng, documents)]
    same = [text(rng, int(n)) for n in lengths.draw(rng, fixed)]
    chances, drawn = zipf(documents, exponent), max(0, min(per_request - fixed, documents))
    for session, start in enumerate(arrivals(rng, requests, rate).tolist()):
        chosen = rng.permutation(rng.choice(documents, drawn, replace=False, p=chances))
        talk, ts, turn = _Conversation(), start, 0
        talk.add(USER_HEADER, system)
        talk.add(*same, *(corpus[d] for d in chosen.tolist()), marked=True)
        while talk.size < CONTEXT_TOKENS:
            talk.add(text(rng, int(QUESTION.draw(rng, 1)[0])))
            yield talk.ask(text(rng, int(ANSWER.draw(rng, 1)[0])), ts, str(session), turn)
            if rng.random() >= again:
                break
            ts, turn = ts + float(rng.exponential(PAUSE_S)), turn + 1
            talk.add(USER_HEADER)


def skills(
    rng: np.random.Generator,
    sessions: int = 80,
    sps: float = 0.5,
    art: float = 5.0,
    tools: int = 60,
    per_session: int = 10,
    tool_tokens: int = 300,
    skills: int = 40,
    skill_tokens: int = 1500,
    load: float = 0.3,
    exponent: float = 0.8,
    system_tokens: int = 1000,
) -> Iterator[TraceRequest]:
    """Agents with a choice of tools each, in fresh order, that read a skill with chance `load` before a step.

    A step follows the last after Poisson(`art`) seconds; what an agent has read stays in its context.
    """
    system = text(rng, system_tokens)
    every = [
        [text(rng, int(n)) for n in Lengths(median, SPREAD, LEAST_TOKENS, CONTEXT_TOKENS // 4).draw(rng, count)]
        for median, count in ((tool_tokens, tools), (skill_tokens, skills))
    ]
    chances, drawn = zipf(tools, exponent), min(per_session, tools)
    for session, n in enumerate(turns(rng, sessions, 2, MEAN_STEPS, MOST_STEPS).tolist()):
        starts = session / sps + np.cumsum(tool_gaps(rng, n, art, 0.0))
        talk = _Conversation()
        talk.add(USER_HEADER, system)
        chosen = rng.permutation(rng.choice(tools, drawn, replace=False, p=chances))
        talk.add(*(every[0][t] for t in chosen.tolist()), marked=True)
        for turn, ts in enumerate(starts.tolist()):
            talk.add(USER_HEADER)
            if rng.random() < load:
                talk.add(every[1][int(rng.choice(skills, p=zipf(skills, exponent)))], marked=True)
            talk.add(text(rng, int((AGENTIC_OBSERVATION if turn else AGENTIC_TASK).draw(rng, 1)[0])))
            if talk.size > CONTEXT_TOKENS:
                break
            yield talk.ask(text(rng, int(OUTPUT.draw(rng, 1)[0])), ts, str(session), turn)
