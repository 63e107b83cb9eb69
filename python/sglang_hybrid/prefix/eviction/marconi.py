"""Marconi's FLOP-aware eviction (section 4.2, equation 2, and 4.3), exactly by the paper."""

import sys

import numpy as np

from sglang_hybrid.core.arrays import FloatArray, IntArray
from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.eviction.candidates import Candidate, Candidates

ONLY_CHILD = 1  # section 4.3 (1): nodes with at most one child are candidates


def flop_efficiency(model: ModelSpec, candidates: Candidates) -> FloatArray:
    """FLOPs saved relative to the parent over the bytes of the node's own states (equation 1), shape [n]."""
    end, parent = candidates.end_tokens, candidates.parent_tokens
    saved = model.prefill_flops(end, parent)
    held = (end - parent) * model.kv_bytes_per_token + candidates.states * model.checkpoint_bytes
    return np.asarray(saved / np.maximum(1.0, held), dtype=np.float64)


def normalised(values: FloatArray) -> FloatArray:
    """`values` mapped linearly to [0, 1] over the batch, all ones where they do not differ."""
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    if not high > low:
        return np.ones_like(values)
    return np.asarray((values - low) / (high - low), dtype=np.float64)


class FlopAware:
    """`S(n) = recency(n) + alpha * flop_efficiency(n)`, both normalised over the candidates; `alpha` 0 is LRU.

    Recency is the time stamp of the last access, as the paper writes (its artifact uses the inverse age). Candidates
    with two or more children score infinity: section 4.3 keeps them until their children are gone.
    """

    def __init__(self, model: ModelSpec, alpha: float = 0.0) -> None:
        if not alpha >= 0.0:
            raise ConfigError(f"alpha weighs FLOP efficiency and cannot be negative: {alpha}")
        self.model = model
        self.alpha = alpha

    def scores(self, candidates: Candidates, now: float) -> FloatArray:
        eligible = candidates.children <= ONLY_CHILD
        efficiency = flop_efficiency(self.model, candidates)
        scores = np.full(len(candidates), np.inf)
        scores[eligible] = normalised(candidates.last_s[eligible])
        if self.alpha:
            scores[eligible] += self.alpha * normalised(efficiency[eligible])
        return scores


class FlopAwareIndex:
    """Exact argmin of `FlopAware` over the live candidates.

    Both normalisations are affine, so the argmin is that of `a*efficiency + b*last_s` for the present extremes; rows
    live in fixed arrays, one vector pass per victim. Ties go to the least recently used.
    """

    def __init__(self, policy: FlopAware) -> None:
        self._policy = policy
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._used = 0
        self._ids: IntArray = np.zeros(64, dtype=np.int64)
        self._columns: FloatArray = np.full((3, 64), np.nan)  # efficiency, last_s, touch; NaN marks an unused row
        self.last_victim = (0.0, 0.0)  # normalised recency and efficiency of the last `pop`

    def put(self, candidate: Candidate) -> None:
        if candidate.children > ONLY_CHILD:
            self.discard(candidate.id)
            return
        row = self._rows.get(candidate.id)
        if row is None:
            row = self._rows[candidate.id] = self._new_row()
            self._ids[row] = candidate.id
        model = self._policy.model
        held = (candidate.end_tokens - candidate.parent_tokens) * model.kv_bytes_per_token
        held += candidate.states * model.checkpoint_bytes
        saved = model.prefill_flops(candidate.end_tokens, candidate.parent_tokens)
        self._columns[:, row] = (saved / max(1.0, held), candidate.last_s, candidate.touch)

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._used == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._columns = np.concatenate((self._columns, np.full_like(self._columns, np.nan)), axis=1)
        self._used += 1
        return self._used - 1

    def discard(self, candidate_id: int) -> None:
        row = self._rows.pop(candidate_id, None)
        if row is not None:
            self._columns[:, row] = np.nan
            self._free.append(row)

    def pop(self, now: float) -> int | None:
        if not self._rows:
            return None
        efficiency, last_s, touch = self._columns[:, : self._used]
        oldest, recency = _scale(last_s)
        poorest, weight = _scale(efficiency)
        scores = recency * last_s
        if self._policy.alpha:
            scores += self._policy.alpha * weight * efficiency
        lowest = np.flatnonzero(scores <= np.nanmin(scores))
        row = int(lowest[np.argmin(touch[lowest])])
        self.last_victim = (float(last_s[row] - oldest) * recency, float(efficiency[row] - poorest) * weight)
        candidate_id = int(self._ids[row])
        self.discard(candidate_id)
        return candidate_id

    def __len__(self) -> int:
        return len(self._rows)

    def check(self) -> None:
        live = np.flatnonzero(~np.isnan(self._columns[0, : self._used]))
        if {int(self._ids[row]): int(row) for row in live} != self._rows:
            raise InvariantError(
                f"rows of the score arrays and their ids disagree, live {live.size}: {len(self._rows)}"
            )


def _scale(values: FloatArray) -> tuple[float, float]:
    """Lowest value, and one over the spread (0 where the values do not differ by a normal number)."""
    low = float(np.nanmin(values))
    spread = float(np.nanmax(values)) - low
    return low, 1.0 / spread if spread >= sys.float_info.min else 0.0
