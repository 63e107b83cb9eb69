"""Text that earlier prompts had at another place, where no prefix reaches it: how much, and where prompts part.

A system text that begins with a date, an id or a user's name leaves nothing to share behind it. Miss reasons say
`never_seen` of such tokens, as of new text; here the two are told apart.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.arrays import WordArray, mixed
from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.trace import Tokens, Trace

Names = WordArray
Places = npt.NDArray[np.int32]

WINDOW = 64
"""Tokens in a row that are looked for; shorter ones repeat by chance in templates."""

SAMPLED = 16
"""One window in so many is looked for, chosen by its tokens and so the same ones in every prompt."""

WORTH_SAYING = 0.05

_AT_ONCE = 1 << 16
"""Tokens of prompts that windows are named of in one go."""

_PARTS = 16
"""In so many parts names are sorted, for the memory that it takes."""

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


class Elsewhere(NamedTuple):
    """What of a trace stands in earlier prompts at another place: an estimate from one window in `SAMPLED`."""

    tokens: int
    """Input tokens beyond what a prompt shares with the beginning of an earlier one."""

    parts: tuple[int, ...]
    """For each prompt that is such text for the most part behind it: where it parts from earlier ones."""


def measure(index: ReuseIndex) -> Elsewhere:
    """Look in every prompt of the trace of `index` for what earlier ones had.

    What requests mark as segments is reused wherever it stands, and not counted.
    """
    trace, seen = index.trace, index.seen_tokens
    prompts, at, names = _windows(trace)
    n_input = np.array([request.n_input for request in trace.requests])
    looked_for = (at >= seen[prompts]) & (at + WINDOW <= n_input[prompts])
    for prompt, request in enumerate(trace.requests):
        if request.segments:
            of_prompt = slice(*np.searchsorted(prompts, (prompt, prompt + 1)))
            for segment in request.segments:
                looked_for[of_prompt] &= (at[of_prompt] < segment.start) | (at[of_prompt] >= segment.end)
    many = np.bincount(prompts[looked_for], minlength=len(trace))
    found = np.bincount(prompts[looked_for & _known(prompts, names)], minlength=len(trace))
    tokens, parts = 0.0, []
    for prompt in np.flatnonzero(many).tolist():
        request, shared, share = trace.requests[prompt], int(seen[prompt]), int(found[prompt]) / int(many[prompt])
        marked = sum(max(0, segment.end - max(segment.start, shared)) for segment in request.segments)
        tokens += share * (request.n_input - shared - marked)
        if share > 0.5:
            parts.append(shared)
    return Elsewhere(round(tokens), tuple(parts))


def _known(prompts: Places, names: Names) -> npt.NDArray[np.bool_]:
    """Of each name whether an earlier prompt has it; `prompts` ascend. A set would take ten times the memory."""
    known = np.zeros(len(names), dtype=np.bool_)
    for part in range(_PARTS):
        at = np.flatnonzero(names % np.uint64(SAMPLED * _PARTS) == part * SAMPLED)
        at = at[np.argsort(names[at], kind="stable")]  # of equal names the earliest first
        ordered = names[at]
        first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(at)])
        known[at] = prompts[at] > np.repeat(prompts[at[first]], np.diff(np.append(first, len(at))))
    return known


def _windows(trace: Trace) -> tuple[Places, Places, Names]:
    """Of each window that is looked for the number of its prompt, its place there, and its name; in order.

    Many prompts at once are one row of tokens, of which windows across two of them are left out.
    """
    found, first = [], 0
    lengths = np.array([len(request.tokens) for request in trace.requests])
    ends = np.cumsum(lengths)
    while first < len(trace):
        behind = max(first + 1, int(np.searchsorted(ends, ends[first] + _AT_ONCE)))
        at, names = _sampled(np.concatenate([request.tokens for request in trace.requests[first:behind]]))
        begins = ends[first:behind] - lengths[first:behind] - (ends[first] - lengths[first])
        prompt = np.searchsorted(begins, at, side="right") - 1
        at -= begins[prompt]
        prompt += first
        whole = at + WINDOW <= lengths[prompt]
        found.append((prompt[whole].astype(np.int32), at[whole].astype(np.int32), names[whole]))
        first = behind
    prompts, places, names = (np.concatenate(each) for each in zip(*found, strict=True))
    return prompts, places, names


def _sampled(tokens: Tokens) -> tuple[npt.NDArray[np.int64], Names]:
    """Places and names of one window of `tokens` in `SAMPLED`; the name depends on the window's tokens alone."""
    count = len(tokens) - WINDOW + 1
    if count <= 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    with np.errstate(over="ignore"):  # all of it is modulo 2^64
        powers = np.full(len(tokens), _BASE, dtype=np.uint64).cumprod()
        sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
        np.cumsum(mixed(tokens.astype(np.uint64)) * powers, out=sums[1:])
        back = np.full(count, _INVERSE, dtype=np.uint64).cumprod()
        names = mixed((sums[WINDOW:] - sums[:count]) * back)
    at = np.flatnonzero(names % np.uint64(SAMPLED) == 0)
    return at, names[at]


def notes(index: ReuseIndex) -> list[str]:
    """What an operator should know of it; nothing where there is little."""
    found = measure(index)
    share = found.tokens / max(1, index.trace.n_input_tokens)
    if share < WORTH_SAYING or not found.parts:
        return []
    return [
        f"about {100 * share:.0f} % of the input tokens stand in earlier prompts at another place, where no prefix "
        f"reaches them. {len(found.parts)} prompts are such text for the most part, and begin like no earlier one "
        f"beyond token {int(np.median(found.parts))} (median). Put what changes there behind what is shared, or mark "
        "what is shared as segments (docs/segments.md)"
    ]
