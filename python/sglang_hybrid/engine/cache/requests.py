"""What we keep with a request of SGLang while it runs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.segment.passes import Pass
from sglang_hybrid.segment.prompt import SegmentedPrompt

_ATTRIBUTE = "sglang_hybrid"


@dataclass
class Checkpoint:
    """A state to be saved in the running forward pass: its position, the wanted one, and the slot it goes to."""

    position: int
    wanted: int
    slot: Any
    written: bool = False


@dataclass
class Tracked:
    """What is kept with a request of SGLang: `known_tokens` of KV at its last match and the id of the node it ended in,
    the `request` as the decisions see it from its first pass on, why tokens missed, and how deep it saved a state.

    `prompt` holds its ids ([n] int32) while it runs; `start` is where its last pass began. `told` is what the server
    that prefilled it says of the cache (`pairs/misses.py`), `explained` whether its client knows why tokens missed.
    `segments` are those it marks (None: not read yet, False: none), `composed` its last pass, if that reused or made
    any. `ahead` says that its state has seen tokens that its KV does not count (`speculation/guards.py`).
    """

    known_tokens: int = 0
    matched: int = -1
    start: int = 0
    prompt: np.ndarray | None = None
    request: Request | None = None
    planned: list[Checkpoint] = field(default_factory=list)
    misses: dict[str, int] | None = None
    told: dict[str, int] | None = None
    explained: bool = False
    saved_tokens: int = 0
    tip_node: Any = None
    finished: bool = False
    segments: SegmentedPrompt | Literal[False] | None = None
    composed: Pass | None = None
    ahead: bool = False

    @property
    def pending(self) -> bool:
        """Whether the states of the request are those before an interior that its KV reaches into."""
        return self.composed is not None and self.composed.pending is not None


@dataclass
class Insertion:
    """What SGLang's insertion parameters carry of ours, as their attribute `hybrid`: one insertion of a request.

    `mark` goes to its state, None to have one made; a `spare` state is worth a slot only while slots are to spare;
    `whole` says that the pass ended its prompt; `taken` are states of the same pass that are inserted afterwards.
    """

    record: Tracked
    mark: Mark | None = None
    spare: bool = False
    whole: bool = False
    taken: list[Checkpoint] = field(default_factory=list)


def tracked(req: Any) -> Tracked:
    """The record of `req`, made on first use."""
    record: Tracked | None = getattr(req, _ATTRIBUTE, None)
    if record is None:
        record = Tracked()
        setattr(req, _ATTRIBUTE, record)
    return record


def ids(values: Sequence[int]) -> np.ndarray:
    """Token ids of a request as int32, shape [n]: the low 30 bits, for placeholders of images are 64-bit hashes.

    SGLang keeps them in an array, which cannot grow while somebody looks into it: what is returned is a copy.
    """
    packed = isinstance(values, array) and values.typecode == "q"
    whole = values if packed else np.fromiter(values, np.int64, len(values))
    low = np.array(whole, np.int32)  # drops the high half; then two bits more
    low &= 0x3FFFFFFF
    return low


def answered(req: Any, tokens: int) -> int:
    """How many of its first `tokens` tokens the client of an ended request has seen: none behind its stop.

    Speculation accepts several at once, and SGLang keeps what it accepted behind a stop.
    """
    through = tokens if req.finished_len is None else len(req.origin_input_ids) + int(req.finished_len)
    return min(tokens, through)


def limit(req: Any) -> int:
    """Where SGLang lets `req` resume at most: logprobs of its prompt that it asks for have to be computed."""
    start = int(req.logprob_start_len) if req.return_logprob else -1
    return start if start >= 0 else len(req.origin_input_ids)


def streams(req: Any) -> bool:
    """Whether `req` is a turn of a streaming session, whose KV and state the session keeps out of the tree."""
    session = getattr(req, "session", None)
    return session is not None and bool(session.streaming)


def namespace(req: Any) -> str | None:
    """What separates tenants: SGLang's extra key and cache salt."""
    parts = (getattr(req, "extra_key", None), getattr(req, "cache_salt", None))
    return None if parts == (None, None) else repr(parts)
