"""Which positions of a request are worth a state.

Asked twice per request: at arrival for its prompt, and at its end for the answer. A policy names positions; whether a
state then stays is decided by eviction.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.request import Request

MOST_POSITIONS = 32
"""States one prefill may save: each holds a slot while the pass runs."""


_WINDOW = 8  # more tokens than any convolution window of a model: a pass must compute that many to save one


def reachable(wanted: int, start: int, end: int, grid: int, step: int, page: int) -> int | None:
    """The deepest position up to `wanted` at which a pass over [start, end) can save a state, None without one.

    Requests resume at multiples of `grid`; the pass has states every `step` tokens, counted from where it begins. The
    last multiple before a prompt's end may lie in an earlier chunk of it, whose pass is the only one that can save it.
    A pass that begins off the grid may have no multiple: then it is the end of a `page`, as it is for SGLang's states.
    """
    for most, unit in ((wanted // grid * grid, grid), (wanted, page)):
        if start < most <= end:
            if most == end and grid == 1:
                return most if end - start >= _WINDOW else None
            last = start + (most - start) // step * step
            at = next((p for p in range(last, start, -step) if p % unit == 0), start)
            if at - start >= max(step, _WINDOW):
                return at
        if step == 1:
            break
    return None


class Places(NamedTuple):
    """Where prefills of a cache can save states, as for `reachable`; a `step` of 0 is one that is not known."""

    grid: int = 1
    step: int = 0
    page: int = 1

    def stands(self, position: int, at: int) -> bool:
        """Whether a state at `position` serves a prefix of `at` tokens as well as any that could be saved.

        It does if no pass that resumes there can save one nearer to that prefix's end; by the grid alone if the step is
        not known.
        """
        if position >= at:
            return position == at
        if not self.step:
            return at // self.grid * self.grid == position
        return reachable(at, position, at + 1, *self) is None


def places(positions: Sequence[int], start: int, end: int, grid: int, step: int, page: int) -> dict[int, int]:
    """Where a pass over [start, end) saves the states wanted at `positions`, and the position that each stands for.

    What the next pass, which begins at `end`, is too short to save is saved as near as this one can. No position is the
    end of a prompt: the next pass runs past it, and the state behind that pass is of no help.
    """
    found: dict[int, int] = {}
    for wanted in positions:
        short = wanted > end and reachable(wanted, end, wanted + 1, grid, step, page) is None
        at = reachable(end if short else wanted, start, end, grid, step, page)
        if at is not None:
            found[at] = wanted
    return found


def keeps_end(behind: int, last: bool, planned: bool, buffered: bool, grid: int, spare: bool) -> bool:
    """Whether the state at the end of a pass, `behind` tokens after the last `planned` one, is kept too.

    The end of a chunk is worth a slot only if there are slots to `spare` and no planned state stands for it. The end of
    a prompt, its `last` pass, is what the next turn continues from, until the answer's own end is there; where states
    are not `buffered` it costs a copy, and the checkpoint just before it, if there is one, serves the same prompt too.
    """
    if last:
        return not planned or buffered
    return behind >= grid and spare


def own_place(start: int, end: int, grid: int) -> int:
    """Where SGLang by itself saves a state of a buffered pass over [start, end); `start` if it saves none."""
    return start + (end - start) // grid * grid


def answer_place(prompt: int, end: int, track: int) -> int:
    """Where decoding left a state in the buffer, of an answer behind `prompt` that ended at `end`; 0 if nowhere."""
    at = end // track * track
    return at if at > prompt else 0


ANYWHERE = Places()
"""A state can lie at any token."""


class AdmissionPolicy(Protocol):
    """Chooses where states are saved."""

    def positions(self, request: Request, start: int, end: int, kv_tokens: int) -> list[int]:
        """Positions in (start, end], ascending and distinct, of a pass that computes those tokens of `request`.

        KV of its first `kv_tokens` tokens is cached. Both may differ from what `request` says: the guard asks what a
        request that resumed elsewhere would save.
        """
        ...


class EveryN:
    """Every multiple of `every` tokens and the end: vLLM's blocks extended to states (Marconi's baseline vLLM+)."""

    def __init__(self, every: int = 32) -> None:
        if every <= 0:
            raise ConfigError(f"save a state every n > 0 tokens: {every}")
        self._every = every

    def positions(self, request: Request, start: int, end: int, kv_tokens: int) -> list[int]:
        first = (start // self._every + 1) * self._every
        return sorted({*range(first, end + 1, self._every), end}) if end > start else []


class EveryChunk(EveryN):
    """The end of every prefill chunk of 2,048 tokens and of the request."""

    def __init__(self) -> None:
        super().__init__(2048)


class MarconiAdmission:
    """Marconi (section 4.1): the branch point of a speculative insertion of the prompt, and the end.

    A branch point is seen only while the KV of the earlier request is still cached.
    """

    def positions(self, request: Request, start: int, end: int, kv_tokens: int) -> list[int]:
        if end <= start:
            return []
        return [kv_tokens, end] if start < kv_tokens < min(end, request.prompt_tokens) else [end]


class HistoryAdmission:
    """Branch and end in one pass, seen by the history, plus declared boundaries the first time they are computed.

    Besides the deepest branch point, shared positions on the way that lost their state are taken again: marks that are
    branches, or boundaries that were declared or seeded before. At most `MOST_POSITIONS`, the deepest.
    """

    def __init__(self, min_branch_tokens: int = 16) -> None:
        self._min_branch_tokens = min_branch_tokens

    def positions(self, request: Request, start: int, end: int, kv_tokens: int) -> list[int]:
        if end <= start:
            return []
        first = start + max(1, self._min_branch_tokens)
        chosen = {end}
        if request.boundaries:
            chosen.update(at for at in request.boundaries if first <= at <= end)
        for at, mark in reversed(request.earlier):
            if at < first:
                break
            if at <= end and mark.shared:
                chosen.add(at)
        if request.branch is not None and first <= request.seen_tokens <= end:
            chosen.add(request.seen_tokens)
        return sorted(chosen)[-MOST_POSITIONS:]
