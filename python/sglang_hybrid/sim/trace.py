"""A trace is what a server was asked, in order: per request the tokens, the split between input and output, the time.

All readers and generators produce `Trace`; replay, ceilings and reports consume nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.segment.geometry import checked
from sglang_hybrid.sim.saving import Saving

Tokens = npt.NDArray[np.int32]
TOKEN_LIMIT = 2**31  # token ids are int32


class TraceError(ConfigError):
    """A trace that cannot be read: corrupt, empty, or with values out of range. The message ends with the value."""


class Segment(NamedTuple):
    """Input tokens [start, end) that the client marked as a segment.

    Equal segments have equal tokens; where tokens are hashes of all before them, equal names instead (-1: none).
    """

    start: int
    end: int
    name: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request: `tokens` is int32 of shape (n_input + n_output,), read-only, input first.

    `ts` is the arrival in seconds from any origin; `session` groups turns and is information for reports and ceilings
    only (a cache never sees it). `boundaries` are input positions whose prefix the client declared to be shared,
    `hints` what it said of the time behind the request, `segments` what it marked as reusable anywhere.
    """

    tokens: Tokens
    n_input: int
    ts: float
    session: str
    turn: int = 0
    boundaries: tuple[int, ...] = ()
    hints: Hints = NO_HINTS
    segments: tuple[Segment, ...] = ()

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_input

    @property
    def input_tokens(self) -> Tokens:
        """What the client sent, a view of shape (n_input,)."""
        return self.tokens[: self.n_input]

    @property
    def output_tokens(self) -> Tokens:
        """What the model answered, a view of shape (n_output,)."""
        return self.tokens[self.n_input :]


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, with the name that reports print.

    `notes` are sentences about how it was read, `model` what the model costs that served it, where the file says so.
    `asked`: it is what clients asked of a server, so caches save states where one does. `saving` is how that server
    did, where the file says so.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()
    model: ModelSpec | None = None
    asked: bool = False
    saving: Saving | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def n_input_tokens(self) -> int:
        return sum(r.n_input for r in self.requests)

    @property
    def duration_s(self) -> float:
        return self.requests[-1].ts - self.requests[0].ts if self.requests else 0.0

    def check(self) -> None:
        """Raise InvariantError unless the requests are ordered, typed and internally consistent."""
        for r in self.requests:
            if r.tokens.dtype != np.int32 or r.tokens.ndim != 1:
                raise InvariantError(f"a request's tokens must be a flat int32 array, got {r.tokens.dtype}")
            if not 0 < r.n_input <= len(r.tokens):
                raise InvariantError(f"n_input must lie in 1..{len(r.tokens)}, got {r.n_input}")
            if len(r.tokens) and int(r.tokens.min()) < 0:
                raise InvariantError(f"token ids are not negative, got {int(r.tokens.min())}")
            if not np.isfinite(r.ts):
                raise InvariantError(f"arrival times are finite seconds, got {r.ts}")
        for a, b in pairwise(self.requests):
            if b.ts < a.ts:
                raise InvariantError(f"requests must be sorted by arrival: {a.ts} s is followed by {b.ts}")


def make_trace(
    name: str,
    requests: Iterable[TraceRequest],
    notes: tuple[str, ...] = (),
    model: ModelSpec | None = None,
    asked: bool = False,
    saving: Saving | None = None,
) -> Trace:
    """Sort by arrival (stable) and shift the origin to the first arrival; raises TraceError when there is nothing."""
    ordered = sorted(requests, key=lambda r: r.ts)
    if not ordered:
        said = "".join(f" ({note})" for note in notes)
        raise TraceError(f"the trace holds no request{said}; give a file with at least one: {name}")
    first = ordered[0].ts
    if first != 0.0:
        ordered = [replace(r, ts=r.ts - first) for r in ordered]
    return Trace(name, tuple(ordered), notes, model, asked, saving)


def make_request(
    input_ids: Sequence[int] | Tokens,
    output_ids: Sequence[int] | Tokens,
    ts: float,
    session: str,
    turn: int = 0,
    where: str = "request",
    boundaries: Sequence[int] = (),
    hints: Hints = NO_HINTS,
    segments: Sequence[Segment] = (),
) -> TraceRequest:
    """Build a request from token ids, validating them; raises TraceError whose message starts with `where`."""
    n_input = len(input_ids)
    if n_input == 0:
        raise TraceError(f"{where}: a request needs at least one input token, got {n_input}")
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not np.isfinite(ts):
        raise TraceError(f"{where}: the arrival must be a finite number of seconds, got {ts!r}")
    declared = tuple(boundaries)
    if not all(type(at) is int and 0 < at <= n_input for at in declared):
        raise TraceError(f"{where}: boundaries are positions within the {n_input} input tokens, got {declared!r:.80}")
    try:
        checked([each[:2] for each in segments], n_input)
    except ConfigError as error:
        raise TraceError(f"{where}: {error}") from error
    tokens = np.empty(n_input + len(output_ids), dtype=np.int32)
    tokens[:n_input] = _checked(input_ids, where)
    tokens[n_input:] = _checked(output_ids, where)
    tokens.flags.writeable = False
    return TraceRequest(tokens, n_input, float(ts), session, turn, declared, hints, tuple(segments))


def _checked(ids: Sequence[int] | Tokens, where: str) -> Tokens:
    try:
        wide = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where}: token ids must be a flat list of integers: {error}") from error
    if wide.size == 0:
        return np.empty(0, dtype=np.int32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise TraceError(f"{where}: token ids must be a flat list of integers, got {wide.dtype}")
    if wide.min() < 0 or wide.max() >= TOKEN_LIMIT:
        bad = wide.min() if wide.min() < 0 else wide.max()
        raise TraceError(f"{where}: token ids must lie in 0..{TOKEN_LIMIT - 1}, got {bad}")
    return wide.astype(np.int32)
