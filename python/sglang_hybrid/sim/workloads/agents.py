"""Agent workloads: long trajectories of tool observations, appended or rewritten.

`swebench` follows the artifact's history rule (all but the last five observations are dropped from the prompt), so a
prompt parts from its predecessor in the middle; `agentic` only appends behind a system prompt shared by all sessions.
"""

from collections.abc import Iterator

import numpy as np

from sglang_hybrid.sim.trace import Tokens, TraceRequest
from sglang_hybrid.sim.workloads.chat import MODEL_HEADER, USER_HEADER
from sglang_hybrid.sim.workloads.draw import CONTEXT_TOKENS, Lengths, text, tool_gaps, turns

KEPT_OBSERVATIONS = 5
TASK = Lengths(1200, 0.45, 300, 6000)
OBSERVATION = Lengths(345, 1.35, 10, 12_000)
OUTPUT = Lengths(134, 0.67, 10, 2048)
SYSTEM_TOKENS = 1500
AGENTIC_TASK = Lengths(560, 0.8, 50, 6000)
AGENTIC_OBSERVATION = Lengths(340, 1.3, 10, 12_000)


def swebench(
    rng: np.random.Generator, sessions: int = 100, sps: float = 1.0, art: float = 5.0, gap_sigma: float = 0.0
) -> Iterator[TraceRequest]:
    """Agents that rewrite their history; a step follows the last after Poisson(`art`) seconds."""
    for session, n in enumerate(turns(rng, sessions, 15, 34.5, 51).tolist()):
        starts = session / sps + np.cumsum(tool_gaps(rng, n, art, gap_sigma))
        yield from _rewritten(rng, str(session), n, starts.tolist())


def _rewritten(rng: np.random.Generator, session: str, n: int, starts: list[float]) -> Iterator[TraceRequest]:
    observations = OBSERVATION.draw(rng, n)
    observations[0] = TASK.draw(rng, 1)[0]
    outputs = OUTPUT.draw(rng, n)
    history: list[list[Tokens]] = []
    for turn in range(n):
        asked = np.concatenate([USER_HEADER, text(rng, int(observations[turn]))])
        answer = np.concatenate([MODEL_HEADER, text(rng, int(outputs[turn]))])
        tokens = np.concatenate([*(piece for round_ in history for piece in round_), asked, answer])
        n_input = len(tokens) - len(answer)
        if n_input > CONTEXT_TOKENS:
            return
        tokens.flags.writeable = False
        yield TraceRequest(tokens, n_input, starts[turn], session, turn)
        if sum(len(round_) == 2 for round_ in history) > KEPT_OBSERVATIONS:
            history[-KEPT_OBSERVATIONS].pop(0)
        history.append([asked, answer])


def agentic(
    rng: np.random.Generator,
    sessions: int = 100,
    sps: float = 1.0,
    art: float = 5.0,
    gap_sigma: float = 0.0,
    system_tokens: int = SYSTEM_TOKENS,
) -> Iterator[TraceRequest]:
    """Agents that only append, behind one system prompt of `system_tokens`, until the context is full."""
    system = np.concatenate([USER_HEADER, text(rng, system_tokens)])
    for session, n in enumerate(turns(rng, sessions, 10, 36.0, 51).tolist()):
        starts = session / sps + np.cumsum(tool_gaps(rng, n, art, gap_sigma))
        observations = AGENTIC_OBSERVATION.draw(rng, n)
        observations[0] = AGENTIC_TASK.draw(rng, 1)[0]
        outputs = OUTPUT.draw(rng, n)
        pieces = [system]
        ends = []
        for asked, answered in zip(observations.tolist(), outputs.tolist(), strict=True):
            pieces += [USER_HEADER, text(rng, asked), MODEL_HEADER, text(rng, answered)]
            ends.append((asked + len(USER_HEADER), answered + len(MODEL_HEADER)))
        tokens = np.concatenate(pieces)
        tokens.flags.writeable = False
        end = len(system)
        for turn, (asked, answered) in enumerate(ends):
            n_input, end = end + asked, end + asked + answered
            if n_input > CONTEXT_TOKENS:
                break
            yield TraceRequest(tokens[:end], n_input, starts[turn], str(session), turn)
