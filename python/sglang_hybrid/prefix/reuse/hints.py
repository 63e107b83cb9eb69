"""What clients say about the time behind their request, as evidence of reuse whose weight is learned.

A hint pins nothing. It puts the resume points of its request into a class of its own, which starts out with the odds
that an honest client means, and learns those that such hints were followed by. Beside that the resume points are
counted as if nothing had been said, and both classes are held against what comes: hints are followed only while they
foretell it better (the likelihood ratio of the two is positive). So hints that say nothing change nothing in the end.

Tenants have sets of classes in turn: what is learned of the hints of one says nothing about another's, as long as no
more than SETS of them send any.
"""

import math
from typing import NamedTuple

from sglang_hybrid.prefix.reuse.table import EDGES_LIST, WIDTHS_LIST, Prior, ReuseTable

SETS = 8
LEVELS = 11  # of seconds until the next request: below 1 s, 2 s, 4 s, ... 512 s, and longer
LIFETIMES_S = (600.0, 7200.0)  # above "5m", above "1h"
FINAL, BACK, LIFETIME = range(3)
_FIRST = (0, 1, 1 + LEVELS)
HINTS = 1 + LEVELS + len(LIFETIMES_S) + 1

FINAL_LEVEL = 0.05  # how much sooner than others a final conversation is continued
LIFETIME_LEVEL = 2.0
GIVEN_UP, SIGMA = 0.15, 0.6  # of those that say when they are back: the share that is not, and the spread of the others
DOUBT, CERTAIN = -2.0, 20.0  # bounds of a likelihood ratio's logarithm: how soon hints are followed again, and no more


class Hints(NamedTuple):
    """`final`: nothing follows upon the answer. `back_in_s`: the next request follows so many seconds after it.

    `lifetime_s`: what the request marks, its end if that is nothing, will be of use for so long. Negative: not said.
    """

    final: bool = False
    back_in_s: float = -1.0
    lifetime_s: float = -1.0


NO_HINTS = Hints()
NAMES = Hints._fields


def hint_classes(hints: Hints, tenant: int) -> tuple[int, int]:
    """The classes in 1..SETS * HINTS of the end of a request with `hints` and of what it marks; 0: nothing is said."""
    first = 1 + tenant % SETS * HINTS
    marked = 0
    if hints.lifetime_s >= 0:
        marked = first + _FIRST[LIFETIME] + sum([hints.lifetime_s > limit for limit in LIFETIMES_S])
    if hints.final:
        return first + _FIRST[FINAL], marked
    if hints.back_in_s >= 0:
        return first + _FIRST[BACK] + min(int(hints.back_in_s).bit_length(), LEVELS - 1), marked
    return 0, marked


class HintTrust:
    """Counts hinted resume points in `table`, whose classes of hints begin at `offset`, and judges the hints.

    A class of a hint is one of `hint_classes`. `log_ratios` has a logarithm per set and kind of hint.
    """

    def __init__(self, table: ReuseTable, offset: int) -> None:
        self._table, self._offset = table, offset - 1
        self.log_ratios = [0.0] * (SETS * len(_FIRST))

    def reuse_class(self, hint: int, plain: int) -> int:
        """The class that counts for a resume point with `hint`, `plain` without it."""
        return self._offset + hint if self.log_ratios[self._judge(hint)] >= 0.0 else plain

    def passed(self, hint: int, plain: int, since_bin: int, to_bin: int) -> None:
        """One of the class outlived the bins [since_bin, to_bin) unused."""
        self._hold(hint, plain, since_bin, to_bin, to_bin)
        self._table.record_passed(plain, since_bin, to_bin)
        self._table.record_passed(self._offset + hint, since_bin, to_bin)

    def used(self, hint: int, plain: int, at_bin: int, since_bin: int) -> None:
        """One of the class was used in `at_bin`, and had passed the bins from `since_bin` on unused."""
        self._hold(hint, plain, since_bin, at_bin, at_bin + 1)
        self._table.record_use(plain, at_bin, since_bin)
        self._table.record_use(self._offset + hint, at_bin, since_bin)

    def _hold(self, hint: int, plain: int, since_bin: int, at_bin: int, end_bin: int) -> None:
        """Hold both classes against what came: unused up to `at_bin`, then used if that is below `end_bin`."""
        said, expected = self._table.hazards[self._offset + hint], self._table.hazards[plain]
        gain = 0.0
        for at in range(since_bin, end_bin):
            if at == at_bin:
                gain += math.log(said[at] / expected[at])
            else:
                gain += math.log((1.0 - said[at]) / (1.0 - expected[at]))
        judge = self._judge(hint)
        self.log_ratios[judge] = min(max(self.log_ratios[judge] + gain, DOUBT), CERTAIN)

    @staticmethod
    def _judge(hint: int) -> int:
        at, kind = (hint - 1) % HINTS, len(_FIRST) - 1
        while at < _FIRST[kind]:
            kind -= 1
        return (hint - 1) // HINTS * len(_FIRST) + kind


def coming(seconds: float) -> tuple[float, ...]:
    """Chance of a reuse per age bin, BINS values, of what is said to come back after about that time (lognormal)."""
    hazard, alive = [], 1.0
    for start, width in zip(EDGES_LIST, WIDTHS_LIST, strict=False):
        z = math.log((start + width) / seconds) / SIGMA
        after = GIVEN_UP + (1.0 - GIVEN_UP) * 0.5 * math.erfc(z / math.sqrt(2.0))
        hazard.append(min(max(1e-3, 1.0 - after / alive), 0.99))
        alive = after
    return tuple(hazard)


def _priors() -> tuple[Prior, ...]:
    back = [Prior(hazard=coming(1.5 * 2.0 ** (at - 1)), apart=True) for at in range(LEVELS)]
    lifetimes = [Prior(LIFETIME_LEVEL, apart=True)] * (len(LIFETIMES_S) + 1)
    return (Prior(FINAL_LEVEL, apart=True), *back, *lifetimes)


PRIORS = _priors() * SETS
"""By class of a hint, from 1 on. They are counted apart: what is expected of others does not follow from them."""
