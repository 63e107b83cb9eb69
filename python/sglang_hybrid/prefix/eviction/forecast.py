"""Forecast: evict the checkpoint whose bytes buy the least FLOPs per second of waiting.

`S(n) = G[class(n), age(n)] * FLOPs(base(n) -> end(n)) / bytes really freed by n`: G is the Gittins index of the time to
the next reuse, learned per class from the uncensored history (`reuse`), the FLOPs are those lost if requests resume at
the nearest remaining checkpoint instead, the bytes are the state plus only the KV that no descendant keeps.
"""

from sglang_hybrid.core.arrays import FloatArray
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.eviction.candidates import Candidate, Candidates
from sglang_hybrid.prefix.eviction.gdsf import densities, density
from sglang_hybrid.prefix.eviction.sampled_index import SampledIndex
from sglang_hybrid.prefix.reuse.table import EDGES_S, ReuseTable, age_bin

_NOTHING = 1e-290
"""Stands for the density of what saves nothing, as KV behind the last state. Of those the largest goes first: then it
matters to no one in which order a tree names them, and a simulated server evicts what the real one does."""


class Forecast:
    """The batch definition of the score."""

    def __init__(self, model: ModelSpec, table: ReuseTable) -> None:
        self.model = model
        self.table = table

    def scores(self, candidates: Candidates, now: float) -> FloatArray:
        bins = (EDGES_S.searchsorted(now - candidates.last_s, side="right") - 1).clip(0)
        rates: FloatArray = self.table.index[candidates.reuse_class, bins]
        return rates * densities(self.model, candidates)


def worth(model: ModelSpec, table: ReuseTable, candidate: Candidate, now: float) -> float:
    """The score of one candidate: FLOPs per second and byte, which is what others may be compared with."""
    return float(table.index[candidate.reuse_class, age_bin(now - candidate.last_s)]) * density(model, candidate)


class ForecastIndex:
    """The same order for live candidates, as exact as `SampledIndex` says."""

    def __init__(self, policy: Forecast) -> None:
        self._model = policy.model
        self._index = SampledIndex(policy.table.index)
        self.discard, self.pop, self.check = self._index.discard, self._index.pop, self._index.check

    def put(self, candidate: Candidate) -> None:
        value = density(self._model, candidate) or _NOTHING / (1 + candidate.freed_kv_tokens)
        self._index.put(candidate.id, candidate.reuse_class, candidate.last_s, value)

    def __len__(self) -> int:
        return len(self._index)
