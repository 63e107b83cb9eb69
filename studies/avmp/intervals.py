"""Paired bootstrap intervals as in Table 2 of AVMP: resample matched cells, report a mean delta or a ratio of means."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ITERATIONS = 10_000
SEED = 20260520  # the paper's


@dataclass(frozen=True)
class Interval:
    """A point estimate over `pairs` matched cells and its 95 % interval."""

    point: float
    low: float
    high: float
    pairs: int

    def excludes(self, null: float) -> bool:
        """Whether `null` lies outside the interval."""
        return not self.low <= null <= self.high


def _interval(point: float, resampled: np.ndarray, pairs: int) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(point, float(low), float(high), pairs)


def paired_delta(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of ours - theirs over matched cells."""
    delta = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    picks = np.random.default_rng(SEED).integers(0, len(delta), size=(ITERATIONS, len(delta)))
    return _interval(float(delta.mean()), delta[picks].mean(axis=1), len(delta))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ratio of the means of ours and theirs over matched cells."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    picks = np.random.default_rng(SEED).integers(0, len(a), size=(ITERATIONS, len(a)))
    return _interval(float(a.mean() / b.mean()), a[picks].mean(axis=1) / b[picks].mean(axis=1), len(a))
