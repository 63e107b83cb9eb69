"""Reuse classes: which resume points are counted together, and what is expected of them before they are counted.

An end that was never used is classed by its kind, and one that continues earlier ends also by how many; where the
context of the model is nearly full, by how much of it is left. A position that was used before is classed by the mean
gap between its uses, and by whether that mean is of one gap or of more.
"""

import numpy as np

from sglang_hybrid.core.arrays import FloatArray
from sglang_hybrid.prefix.reuse import hints
from sglang_hybrid.prefix.reuse.table import EDGES_S, WIDTHS_S, Prior
from sglang_hybrid.prefix.tree.mark import FIRST, LATER, NEAR, Kind, Mark

NEAR_TOKENS = 64
DEPTHS = 4  # ends appended to 1, 2-3, 4-7, 8 and more earlier ones
ROOMS = 3  # at most 1/16, 1/32, 1/64 of the context is left: what does not fit any more does not come
GAPS = 11  # mean gaps below 0.5 s, 1 s, 2 s, ... 256 s, and longer ones
FIRST_GAP_S = 0.5
ONCE_GAPS, ONCE_GIVEN_UP = 1.0, 0.5  # after one gap: what it is worth, and the chance of no further use
OFTEN_GAPS, OFTEN_GIVEN_UP = 3.0, 0.2
SUPERSEDED_LEVEL = 0.05

_SITES = int(Kind.DECLARED)  # the last of the kinds has a class for each site
_APPENDED = _SITES + 3
_SUPERSEDED_OFTEN = _APPENDED + DEPTHS
_ONCE = _SUPERSEDED_OFTEN + 1
_OFTEN = _ONCE + GAPS
_FULL = _OFTEN + GAPS
PLAIN_CLASSES = _FULL + ROOMS  # behind them the classes of hints


def reuse_class(mark: Mark) -> int:
    """The index in `PRIORS` of the class a mark belongs to now, whatever its client says of it."""
    hits, kind = mark.hits, mark.kind
    if kind is Kind.SUPERSEDED:
        return int(kind) if hits < 2 else _SUPERSEDED_OFTEN
    if hits:
        return (_ONCE if hits == 1 else _OFTEN) + gap_level(mark.gap_s)
    if mark.room and kind < Kind.BRANCH:
        return _FULL + mark.room - 1
    if kind is Kind.DECLARED:
        return _SITES + mark.site
    if mark.depth:
        return _APPENDED + min(mark.depth.bit_length(), DEPTHS) - 1
    return int(kind)


def site(first: bool, tokens_behind: int) -> int:
    """The site of a position with `tokens_behind` of its prompt behind it; who declares the very end will share it."""
    return NEAR if 0 < tokens_behind <= NEAR_TOKENS else FIRST if first else LATER


def room(end_tokens: int, context_tokens: int) -> int:
    """Which share of the context is left behind `end_tokens`, in 1..ROOMS; 0: more, or nobody knows (0 tokens)."""
    if not context_tokens:
        return 0
    part = context_tokens // max(context_tokens - end_tokens, 1)
    return min(max(part.bit_length() - 4, 0), ROOMS)


def gap_level(gap_s: float) -> int:
    """The level of a mean gap in seconds, below `GAPS`."""
    return min(max(int(gap_s / FIRST_GAP_S), 0).bit_length(), GAPS - 1)


def returning(gap_s: float, gaps: float, given_up: float) -> FloatArray:
    """Chance of a reuse per age bin, shape [BINS], of what came back after `gap_s` seconds on average.

    With chance `given_up` it is never used again; otherwise its rate is known from its own mean gap only, worth as much
    as `gaps` gaps: a gamma distributed rate makes the waiting time a Pareto one (the model of Fader, Hardie & Lee 2005
    for customers who leave). So an age of many times the own gap tells that it has been given up.
    """
    ends = EDGES_S[:-1] + WIDTHS_S
    unused = given_up + (1.0 - given_up) * (1.0 + np.append(0.0, ends) / (gaps * gap_s)) ** -gaps
    return np.asarray(1.0 - unused[1:] / unused[:-1], dtype=np.float64)


def _priors() -> tuple[Prior, ...]:
    kinds = [Prior(SUPERSEDED_LEVEL if kind is Kind.SUPERSEDED else 1.0) for kind in Kind]
    appended = [Prior(group="appended")] * DEPTHS
    kinds[Kind.APPENDED] = appended[0]
    sites = [Prior(group="declared")] * 3
    means = [FIRST_GAP_S * 2.0 ** (level - 0.5) for level in range(GAPS)]
    once = [Prior(hazard=tuple(returning(gap, ONCE_GAPS, ONCE_GIVEN_UP))) for gap in means]
    often = [Prior(hazard=tuple(returning(gap, OFTEN_GAPS, OFTEN_GIVEN_UP))) for gap in means]
    full = [Prior(group="full")] * ROOMS
    return (*kinds[:_SITES], *sites, *appended, Prior(SUPERSEDED_LEVEL), *once, *often, *full, *hints.PRIORS)


PRIORS = _priors()
