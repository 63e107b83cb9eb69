"""What an eviction policy sees: one candidate, or a batch of them as arrays. No tree, no engine object."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.arrays import FloatArray, IntArray


class Candidate(NamedTuple):
    """One thing that can be evicted now, all positions in tokens from the start of its sequence.

    `base_tokens` is the nearest shallower checkpoint a request would resume from instead, `parent_tokens` the end of
    the parent node, `freed_kv_tokens` the KV that goes with it (0 when descendants keep it), `states` 1 or 0.
    """

    id: int
    end_tokens: int
    base_tokens: int
    parent_tokens: int
    freed_kv_tokens: int
    states: int
    children: int
    last_s: float
    touch: int
    hits: int
    superseded: bool
    reuse_class: int


@dataclass(frozen=True)
class Candidates:
    """A batch of candidates: one array of shape [n] per field of `Candidate`."""

    id: IntArray
    end_tokens: IntArray
    base_tokens: IntArray
    parent_tokens: IntArray
    freed_kv_tokens: IntArray
    states: IntArray
    children: IntArray
    last_s: FloatArray
    touch: IntArray
    hits: IntArray
    superseded: npt.NDArray[np.bool_]
    reuse_class: IntArray

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> "Candidates":
        rows = list(candidates)
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(Candidate._fields)
        kinds = {"last_s": np.float64, "superseded": np.bool_}
        return cls(
            **{
                name: np.array(column, dtype=kinds.get(name, np.int64))
                for name, column in zip(Candidate._fields, columns, strict=True)
            }
        )

    def __len__(self) -> int:
        return int(self.id.size)


class VictimIndex(Protocol):
    """The live candidates of one policy, kept so that the lowest score is found without scoring all of them."""

    def put(self, candidate: Candidate) -> None:
        """Add `candidate`, or replace what is known under its id."""
        ...

    def discard(self, candidate_id: int) -> None:
        """Forget a candidate; unknown ids are ignored."""
        ...

    def pop(self, now: float) -> int | None:
        """Remove and return the id of the next victim, None when there is no candidate."""
        ...

    def check(self) -> None:
        """Raise InvariantError where the index contradicts itself."""
        ...

    def __len__(self) -> int: ...
