"""Forecast: evict the checkpoint whose bytes buy the least FLOPs per second of waiting.

`S(n) = G[class(n), age(n)] * FLOPs(base(n) -> end(n)) / bytes really freed by n`: G is the Gittins index of the time to
the next reuse, learned per class from the uncensored history (`reuse`), the FLOPs are those lost if requests restart at
the nearest remaining checkpoint instead, the bytes are the state plus only the KV that no descendant keeps.
"""

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.calendar import AgingHeaps
from sglang_hybrid.prefix.candidates import Candidate, Candidates, FloatArray
from sglang_hybrid.prefix.gdsf import densities, density
from sglang_hybrid.prefix.reuse import EDGES_S, ReuseTable


class Forecast:
    """The batch definition of the score."""

    def __init__(self, model: ModelSpec, table: ReuseTable) -> None:
        self.model = model
        self.table = table

    def scores(self, candidates: Candidates, now: float) -> FloatArray:
        bins = (EDGES_S.searchsorted(now - candidates.last_s, side="right") - 1).clip(0)
        rates: FloatArray = self.table.index[candidates.reuse_class, bins]
        return rates * densities(self.model, candidates)


class ForecastIndex:
    """The same order from `AgingHeaps`: O(log n) per victim, as exact as stated there."""

    def __init__(self, policy: Forecast) -> None:
        self._model = policy.model
        self._heaps = AgingHeaps(policy.table.index)
        self._now = 0.0
        self.discard = self._heaps.discard

    def put(self, candidate: Candidate) -> None:
        last_s = candidate.last_s
        if last_s > self._now:
            self._now = last_s
        value = density(self._model, candidate) or 1e-300
        self._heaps.put(candidate.id, candidate.reuse_class, last_s, value, self._now)

    def pop(self, now: float) -> int | None:
        self._now = max(self._now, now)
        return self._heaps.pop(self._now)

    @property
    def last_score(self) -> float:
        """The score of the entry that `pop` returned last."""
        return self._heaps.last_score

    def __len__(self) -> int:
        return len(self._heaps)

    def check(self) -> None:
        self._heaps.check()
