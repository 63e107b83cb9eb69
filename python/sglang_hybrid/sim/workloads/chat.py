"""Chat workloads shaped like the paper's LMSys and ShareGPT traces (Figure 6): ten turns or more, each appended.

Every message opens with BOS and a role header of JSON, as in the artifact's traces, so all sessions share five tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_hybrid.sim.trace import TraceRequest
from sglang_hybrid.sim.workloads.draw import CONTEXT_TOKENS, WRAPPER_TOKENS, Ints, Lengths, text, turns, typing_gaps

USER_HEADER = np.array([1, 10, 11, 12, 13], dtype=np.int32)
MODEL_HEADER = np.array([1, 10, 11, 14, 13], dtype=np.int32)


@dataclass(frozen=True)
class ChatShape:
    """The shape of a chat data set."""

    least_turns: int
    mean_turns: float
    most_turns: int
    user: Lengths  # typed tokens, without header and wrapper
    output: Lengths


LMSYS = ChatShape(10, 15.3, 60, Lengths(21, 1.15, 1, 4000), Lengths(252, 0.92, 8, 4096))
SHAREGPT = ChatShape(10, 13.3, 40, Lengths(11, 0.92, 1, 1200), Lengths(58, 0.93, 4, 1500))


def lmsys(
    rng: np.random.Generator, sessions: int = 100, sps: float = 1.0, gap_sigma: float = 0.0
) -> Iterator[TraceRequest]:
    """Chats with long answers; `sps` sessions start a second, users type at 90 words a minute."""
    return _chats(rng, LMSYS, sessions, sps, gap_sigma)


def sharegpt(
    rng: np.random.Generator, sessions: int = 100, sps: float = 1.0, gap_sigma: float = 0.0
) -> Iterator[TraceRequest]:
    """Chats with short answers."""
    return _chats(rng, SHAREGPT, sessions, sps, gap_sigma)


def _chats(
    rng: np.random.Generator, shape: ChatShape, sessions: int, sps: float, gap_sigma: float
) -> Iterator[TraceRequest]:
    for session, n in enumerate(turns(rng, sessions, shape.least_turns, shape.mean_turns, shape.most_turns)):
        typed = shape.user.draw(rng, int(n))
        output = shape.output.draw(rng, int(n))
        starts = session / sps + np.cumsum(typing_gaps(rng, typed, gap_sigma))
        yield from appended(rng, str(session), typed + WRAPPER_TOKENS, output, starts.tolist())


def appended(
    rng: np.random.Generator, session: str, user: Ints, output: Ints, starts: list[float]
) -> Iterator[TraceRequest]:
    """Turns of one session whose prompts grow at the end: views of one token array, cut at the context length."""
    head = len(USER_HEADER)
    ends = np.cumsum(np.column_stack([user + head, output + head]).reshape(-1)).reshape(-1, 2)
    tokens = text(rng, int(ends[-1, 1]))
    begins = np.concatenate([[0], ends.reshape(-1)[:-1]]).reshape(-1, 2)
    for i in range(head):
        tokens[begins[:, 0] + i] = USER_HEADER[i]
        tokens[begins[:, 1] + i] = MODEL_HEADER[i]
    tokens.flags.writeable = False
    for turn, (n_input, end) in enumerate(ends.tolist()):
        if end > CONTEXT_TOKENS:
            return
        yield TraceRequest(tokens[:end], n_input, starts[turn], session, turn)
