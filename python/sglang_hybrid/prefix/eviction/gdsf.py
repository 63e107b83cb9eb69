"""GreedyDual-Size-Frequency (Cherkasova 1998) with FLOPs as cost and really freed bytes as size."""

import heapq

import numpy as np

from sglang_hybrid.core.arrays import FloatArray
from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.eviction.candidates import Candidate, Candidates


def density(model: ModelSpec, candidate: Candidate) -> float:
    """FLOPs lost per byte freed if `candidate` goes and requests resume at its base instead."""
    freed = candidate.freed_kv_tokens * model.kv_bytes_per_token + candidate.states * model.checkpoint_bytes
    return model.prefill_flops(candidate.end_tokens, candidate.base_tokens) / (freed or 1)


def densities(model: ModelSpec, candidates: Candidates) -> FloatArray:
    """`density` of a batch, shape [n]."""
    freed = candidates.freed_kv_tokens * model.kv_bytes_per_token + candidates.states * model.checkpoint_bytes
    saved = model.prefill_flops(candidates.end_tokens, candidates.base_tokens)
    return np.asarray(saved / np.maximum(1, freed), dtype=np.float64)


class Gdsf:
    """Score `L + (1 + hits) * FLOPs / bytes`, where L is the score of the last victim when the entry was last used.

    Its own index: a heap with lazy deletion, O(log n). An entry is re-priced when it is put again.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._inflation = 0.0
        self._entries: dict[int, tuple[int, float, float]] = {}  # id -> touch, L at that touch, score
        self._heap: list[tuple[float, int]] = []

    def scores(self, candidates: Candidates, now: float) -> FloatArray:
        floor = np.array([self._floor(int(i), int(t)) for i, t in zip(candidates.id, candidates.touch, strict=True)])
        return floor + (1 + candidates.hits) * densities(self._model, candidates)

    def _floor(self, candidate_id: int, touch: int) -> float:
        entry = self._entries.get(candidate_id)
        return entry[1] if entry is not None and entry[0] == touch else self._inflation

    def put(self, candidate: Candidate) -> None:
        floor = self._floor(candidate.id, candidate.touch)
        score = floor + (1 + candidate.hits) * density(self._model, candidate)
        self._entries[candidate.id] = (candidate.touch, floor, score)
        heapq.heappush(self._heap, (score, candidate.id))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(entry[2], i) for i, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def discard(self, candidate_id: int) -> None:
        self._entries.pop(candidate_id, None)

    def pop(self, now: float) -> int | None:
        while self._heap:
            score, candidate_id = heapq.heappop(self._heap)
            entry = self._entries.get(candidate_id)
            if entry is not None and entry[2] == score:
                del self._entries[candidate_id]
                self._inflation = max(self._inflation, score)
                return candidate_id
        return None

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        queued = set(self._heap)
        missing = [i for i, entry in self._entries.items() if (entry[2], i) not in queued]
        if missing:
            raise InvariantError(f"every entry is in the heap with its present score: {missing}")
