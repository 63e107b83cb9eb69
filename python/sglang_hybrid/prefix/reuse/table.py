"""How soon a checkpoint of some class is used again, learned online, and the index value of waiting for it.

Ages are seconds since last use in logarithmic bins. Per class and bin the table counts marks that were used again in
the bin (`events`) and marks that passed it unused (`passed`); the hazard is their ratio, shrunk towards what is
expected of the class. From it follows the Gittins index: the best, over all horizons W, of the chance of a reuse within
W over the expected time the bytes are held until reuse or W.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_hybrid.core.arrays import FloatArray
from sglang_hybrid.core.errors import ConfigError, InvariantError

FIRST_EDGE_S = 0.5
EDGE_RATIO = 1.35
BINS = 36
EDGES_S: FloatArray = np.concatenate(([0.0], FIRST_EDGE_S * EDGE_RATIO ** np.arange(BINS - 1), [np.inf]))
WIDTHS_S: FloatArray = np.diff(np.append(EDGES_S[:-1], EDGES_S[-2] * EDGE_RATIO))
FIRST_GUESS = 0.06  # hazard per bin before anything was seen: constant per logarithmic bin, so the index falls as 1/age
LEVEL_WEIGHT = 2.0  # expected events the prior level of a class is worth
GROUP_LEVEL_WEIGHT = 10.0  # the same within a group
WEIGHT = 20.0  # observations per bin that the expectation of a group, or one that names its bins, is worth
NEWS = 1.0 / 32.0  # a class is reckoned anew when its counts, or those of its group, grew by this share
EDGES_LIST: list[float] = [float(edge) for edge in EDGES_S]
WIDTHS_LIST: list[float] = [float(width) for width in WIDTHS_S]
LEAST_RATE = 1e-12
DECAY = 0.5**0.125


def age_bin(age_s: float) -> int:
    """The bin of an age in seconds; negative ages count as zero."""
    return bisect_right(EDGES_LIST, age_s) - 1 if age_s > 0.0 else 0


def flat(values: FloatArray) -> "memoryview[float]":
    """The memory of a contiguous array as one row: single elements cost a third of what the array takes for them."""
    return values.data.cast("B").cast("d")


class Prior(NamedTuple):
    """What is expected of a class before anything was seen of it.

    `level`: how much sooner than expected it is used again. Expected is the hazard per bin in `hazard` (length BINS);
    without it that of all classes of the same `group`, without one that of all classes but those that stand `apart`.
    """

    level: float = 1.0
    hazard: tuple[float, ...] | None = None
    group: str | None = None
    apart: bool = False


class ReuseTable:
    """Event counts, hazards and index values of reuse classes; the number of `priors` is the number of classes.

    The hazard of a class is shrunk towards the expected one times the level of the class, which is learned first, from
    all its bins together. The prior is worth `shrinkage` observations per bin where it is the hazard of all classes or
    of a group, otherwise `WEIGHT`. After `half_life` observed reuses old counts weigh half, so a phase change is
    learned anew. `refresh` recomputes one class, in about ten microseconds.

    Counts are plain lists by class * BINS + bin, with their sums over groups and over all classes beside them: for a
    few dozen bins a loop that is compiled takes a fifth of what arrays take (and one that is not, no longer).
    """

    def __init__(self, priors: Sequence[Prior], shrinkage: float = 80.0, half_life: float = 4000.0) -> None:
        if not priors or shrinkage <= 0 or half_life <= 0:
            raise ConfigError(
                f"name classes, a shrinkage > 0 and a half life > 0: {len(priors)}, {shrinkage}, {half_life}"
            )
        self.classes = len(priors)
        self._priors = tuple(priors)
        groups: dict[str | int, list[int]] = {}
        for number, prior in enumerate(priors):
            groups.setdefault(prior.group or number, []).append(number)
        self._apart = [prior.apart for prior in priors]
        self._group = [groups[prior.group or number] for number, prior in enumerate(priors)]
        self.events = [0.0] * (self.classes * BINS)
        self.passed = [0.0] * (self.classes * BINS)
        self._all = _Sums()
        self._sums = {members[0]: _Sums() for members in groups.values() if len(members) > 1}  # by first of the group
        self.index: FloatArray = np.full((self.classes, BINS), 1e-6)
        self._index_values = flat(self.index)
        self.hazards: list[list[float]] = [[FIRST_GUESS] * BINS] * self.classes  # that the index was reckoned from
        self._shrinkage = shrinkage
        self._half_life = half_life
        self._since_decay = 0
        self._counted = [0.0] * self.classes  # by the first class of a group
        self._news = [0.0] * self.classes
        self._stale = dict.fromkeys(range(self.classes))
        while self._stale:
            self.refresh()

    def record_use(self, reuse_class: int, at_bin: int, since_bin: int = 0) -> None:
        """A mark of `reuse_class` was used again in `at_bin`, and had passed the bins from `since_bin` on unused."""
        self.events[reuse_class * BINS + at_bin] += 1.0
        if not self._apart[reuse_class]:
            self._all.events[at_bin] += 1.0
        group = self._sums.get(self._group[reuse_class][0])
        if group is not None:
            group.events[at_bin] += 1.0
        self.record_passed(reuse_class, since_bin, at_bin)
        if self._apart[reuse_class]:
            return  # counted once already
        self._since_decay += 1
        if self._since_decay >= self._half_life / 8:
            self._since_decay = 0
            self.events, self.passed = decayed(self.events), decayed(self.passed)
            self._counted = decayed(self._counted)
            for sums in (self._all, *self._sums.values()):
                sums.events, sums.passed = decayed(sums.events), decayed(sums.passed)

    def record_passed(self, reuse_class: int, since_bin: int, to_bin: int) -> None:
        """A mark of `reuse_class` outlived the bins [since_bin, to_bin) unused."""
        members = self._group[reuse_class]
        first = members[0]
        group, start, apart = self._sums.get(first), reuse_class * BINS, self._apart[reuse_class]
        for at in range(since_bin, to_bin):
            self.passed[start + at] += 1.0
            if not apart:
                self._all.passed[at] += 1.0
            if group is not None:
                group.passed[at] += 1.0
        self._counted[first] += 1.0
        self._news[first] += 1.0
        if self._news[first] >= NEWS * self._counted[first]:
            self._news[first] = 0.0
            for member in members:
                self._stale[member] = None

    def refresh(self) -> None:
        """Recompute the index values of the class that waits longest for it, if any does."""
        if self._stale:
            reuse_class = next(iter(self._stale))
            del self._stale[reuse_class]
            row, at = self._index_values, reuse_class * BINS
            self.hazards[reuse_class] = hazard = self.hazard(reuse_class)
            for rate in gittins(hazard):
                row[at] = rate
                at += 1

    def hazard(self, reuse_class: int) -> list[float]:
        """Chance of a reuse within each bin given survival to it, BINS values."""
        start = reuse_class * BINS
        events, passed = self.events[start : start + BINS], self.passed[start : start + BINS]
        prior = self._priors[reuse_class]
        if prior.hazard is not None:
            return smoothed(shrunk(events, passed, prior.hazard, WEIGHT, prior.level, LEVEL_WEIGHT))
        expected = [
            (used + 8.0 * FIRST_GUESS) / (used + unused + 8.0)
            for used, unused in zip(self._all.events, self._all.passed, strict=True)
        ]
        group = self._sums.get(self._group[reuse_class][0])
        if group is None:
            return smoothed(shrunk(events, passed, expected, self._shrinkage, prior.level, LEVEL_WEIGHT))
        expected = shrunk(group.events, group.passed, expected, WEIGHT, 1.0, LEVEL_WEIGHT)
        return smoothed(shrunk(events, passed, expected, self._shrinkage, prior.level, GROUP_LEVEL_WEIGHT))

    def check(self) -> None:
        """Raise InvariantError for negative counts, wrong sums, or index values that are not positive and finite."""
        if min(self.events) < 0 or min(self.passed) < 0:
            raise InvariantError(f"reuse counts cannot be negative: {min(*self.events, *self.passed)}")
        groups = [(sums, self._group[first]) for first, sums in self._sums.items()]
        for sums, classes in [(self._all, [c for c in range(self.classes) if not self._apart[c]]), *groups]:
            for counts, sum_of in ((self.events, sums.events), (self.passed, sums.passed)):
                for at in range(BINS):
                    counted = sum(counts[number * BINS + at] for number in classes)
                    if abs(counted - sum_of[at]) > 1e-6 * (1.0 + counted):
                        raise InvariantError(f"counts of bin {at} add up to {counted}: {sum_of[at]}")
        if not (np.isfinite(self.index).all() and self.index.min() > 0):
            raise InvariantError(f"index values are positive and finite: {self.index.min()}")


class _Sums:
    """Counts per bin over several classes."""

    __slots__ = ("events", "passed")

    def __init__(self) -> None:
        self.events = [0.0] * BINS
        self.passed = [0.0] * BINS


def decayed(counts: list[float]) -> list[float]:
    """`counts`, an eighth of a half life later."""
    return [DECAY * count for count in counts]


def shrunk(
    events: list[float],
    passed: list[float],
    expected: Sequence[float],
    weight: float,
    level: float,
    level_weight: float,
) -> list[float]:
    """The hazard counted, shrunk towards `expected` times its level, BINS values each.

    `level` is what the level is taken for before counting, worth `level_weight` expected events; the expectation is
    worth `weight` observations per bin.
    """
    used, awaited = level_weight * level, level_weight
    for at in range(BINS):
        used += events[at]
        awaited += (events[at] + passed[at]) * expected[at]
    level = used / awaited
    hazard = []
    for at in range(BINS):
        prior = level * expected[at]
        prior = prior if prior < 0.9 else 0.9
        hazard.append((events[at] + weight * prior) / (events[at] + passed[at] + weight))
    return hazard


def smoothed(hazard: list[float]) -> list[float]:
    """`hazard` under a [1 2 1]/4 kernel along the bins, whose ends count twice."""
    result, before = [], hazard[0]
    for at in range(BINS):
        here = hazard[at]
        after = hazard[at + 1] if at + 1 < BINS else here
        result.append((before + 2.0 * here + after) / 4.0)
        before = here
    return result


def gittins(hazard: Sequence[float]) -> list[float]:
    """`max over W of P(reuse in (a, a+W]) / E[min(T, W)]` in 1/s at the start of each age bin, one value per bin.

    Discrete form of the index for jobs of unknown length (Gittins 1979; Aalto, Ayesta & Righter 2009): a stopping
    horizon is the end of a bin, and a reuse within a bin is placed at its middle. The best horizon is where the line
    from (seconds held, chance of a reuse) at `a` touches the upper hull of the later points, built from the right.
    """
    alive, held = 1.0, 0.0
    helds, alives = [held], [alive]
    for chance, width_s in zip(hazard, WIDTHS_LIST, strict=True):
        held += alive * width_s * (1.0 - chance / 2.0)
        alive *= 1.0 - chance
        helds.append(held)
        alives.append(alive)
    hull = [BINS]
    rates = []
    for at in range(BINS - 1, -1, -1):
        held, alive = helds[at], alives[at]
        end = hull[-1]
        rate = (alive - alives[end]) / (helds[end] - held) if helds[end] > held else 0.0
        while len(hull) > 1:
            end = hull[-2]
            further = (alive - alives[end]) / (helds[end] - held) if helds[end] > held else 0.0
            if further < rate:
                break
            rate = further
            hull.pop()
        hull.append(at)
        rates.append(rate if rate > LEAST_RATE else LEAST_RATE)
    rates.reverse()
    return rates
