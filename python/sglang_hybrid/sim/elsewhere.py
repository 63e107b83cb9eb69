"""Text that earlier prompts had at another place, where no prefix reaches it: how much, and where prompts part.

A system text that begins with a date, an id or a user's name leaves nothing to share behind it. Miss reasons say
`never_seen` of such tokens, as of new text; here the two are told apart.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.trace import Tokens, Trace

Names = npt.NDArray[np.uint64]

WINDOW = 64
"""Tokens in a row that are looked for; shorter ones repeat by chance in templates."""

SAMPLED = 16
"""One window in so many is looked for, chosen by its tokens and so the same ones in every prompt."""

WORTH_SAYING = 0.05

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


class Elsewhere(NamedTuple):
    """What of a trace stands in earlier prompts at another place: an estimate from one window in `SAMPLED`."""

    tokens: int
    """Input tokens beyond what a prompt shares with the beginning of an earlier one."""

    parts: tuple[int, ...]
    """For each prompt that is such text for the most part behind it: where it parts from earlier ones."""


def measure(trace: Trace) -> Elsewhere:
    """Look in every prompt of `trace` for what earlier ones had.

    What requests mark as segments is reused wherever it stands, and not counted.
    """
    seen = ReuseIndex(trace).seen_tokens
    known: set[int] = set()
    tokens, parts = 0.0, []
    for request, shared in zip(trace.requests, seen, strict=True):
        at, names = _sampled(request.tokens)
        behind = (at >= shared) & (at + WINDOW <= request.n_input)
        for segment in request.segments:
            behind &= (at < segment.start) | (at >= segment.end)
        looked_for = names[behind].tolist()
        if looked_for:
            share = sum(name in known for name in looked_for) / len(looked_for)
            marked = sum(max(0, segment.end - max(segment.start, int(shared))) for segment in request.segments)
            tokens += share * (request.n_input - int(shared) - marked)
            if share > 0.5:
                parts.append(int(shared))
        known.update(names.tolist())
    return Elsewhere(round(tokens), tuple(parts))


def _sampled(tokens: Tokens) -> tuple[npt.NDArray[np.int64], Names]:
    """Places and names of one window of `tokens` in `SAMPLED`; the name depends on the window's tokens alone."""
    count = len(tokens) - WINDOW + 1
    if count <= 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    with np.errstate(over="ignore"):  # all of it is modulo 2^64
        powers = np.full(len(tokens), _BASE, dtype=np.uint64).cumprod()
        sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
        np.cumsum(_mixed(tokens.astype(np.uint64)) * powers, out=sums[1:])
        back = np.full(count, _INVERSE, dtype=np.uint64).cumprod()
        names = _mixed((sums[WINDOW:] - sums[:count]) * back)
    at = np.flatnonzero(names % np.uint64(SAMPLED) == 0)
    return at, names[at]


def notes(trace: Trace) -> list[str]:
    """What an operator should know of it; nothing where there is little."""
    found = measure(trace)
    share = found.tokens / max(1, trace.n_input_tokens)
    if share < WORTH_SAYING or not found.parts:
        return []
    return [
        f"about {100 * share:.0f} % of the input tokens stand in earlier prompts at another place, where no prefix "
        f"reaches them. {len(found.parts)} prompts are such text for the most part, and begin like no earlier one "
        f"beyond token {int(np.median(found.parts))} (median). Put what changes there behind what is shared, or mark "
        "what is shared as segments (docs/segments.md)"
    ]


def _mixed(values: Names) -> Names:
    """A bijection of 64 bits whose every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
