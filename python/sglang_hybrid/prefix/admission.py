"""Which positions of a prefill are worth a checkpoint.

`positions(prefill)` is asked once per request, when its input is known and its output length is (in serving: when the
request finishes; the branch point is known before prefill). Policies name positions; whether a checkpoint then pays
for its bytes is decided by eviction, which may drop it at once (`insert-then-trim`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.history import Sighting
from sglang_hybrid.prefix.mark import Kind

MOST_POSITIONS = 32
"""Checkpoints one prefill may take: each holds a state slot while the pass runs."""


class Prefill(NamedTuple):
    """One request as admission sees it; all positions in tokens from its start.

    The pass computes (restart_tokens, end_tokens], input up to `input_tokens`, so only those positions can be
    checkpointed. `known_tokens` of the input were already in the cache tree (KV included) before it. `sighting` is the
    history's view, None without a history; `boundaries` are positions the caller declared.
    """

    restart_tokens: int
    known_tokens: int
    input_tokens: int
    end_tokens: int
    boundaries: tuple[int, ...] = ()
    sighting: Sighting | None = None


class AdmissionPolicy(Protocol):
    """Chooses checkpoint positions."""

    def positions(self, prefill: Prefill) -> list[int]:
        """Positions in (restart_tokens, end_tokens], ascending and distinct."""
        ...


class EveryN:
    """Every multiple of `every` tokens and the end: vLLM's blocks extended to states (Marconi's baseline vLLM+)."""

    def __init__(self, every: int) -> None:
        if every <= 0:
            raise ConfigError(f"checkpoint every n > 0 tokens: {every}")
        self._every = every

    def positions(self, prefill: Prefill) -> list[int]:
        first = (prefill.restart_tokens // self._every + 1) * self._every
        return ordered([*range(first, prefill.end_tokens + 1, self._every), prefill.end_tokens], prefill)


class AllChunks(EveryN):
    """The end of every prefill chunk and of the request, as SGLang admits states."""

    def __init__(self, chunk_tokens: int = 2048) -> None:
        super().__init__(chunk_tokens)


class BranchAndEnd:
    """Marconi (section 4.1): the branch point of a speculative insertion of the input, and the last token.

    A branch point is seen only while the KV of the earlier request is still cached.
    """

    def positions(self, prefill: Prefill) -> list[int]:
        branches = [prefill.known_tokens] if prefill.known_tokens < prefill.input_tokens else []
        return ordered([*branches, prefill.end_tokens], prefill)


class Judicious:
    """Branch and end in one pass, seen by the ghost history, plus declared boundaries on their first sighting.

    Besides the deepest branch point, shared positions on the way that lost their checkpoint are taken again: marks
    that are branches, or boundaries that were declared or seeded before. At most `MOST_POSITIONS`, the deepest.
    """

    def __init__(self, min_branch_tokens: int = 16) -> None:
        self._min_branch_tokens = min_branch_tokens

    def positions(self, prefill: Prefill) -> list[int]:
        restart, seen, n_input, end, boundaries, sighting = prefill
        if end <= restart:
            return []
        first = restart + max(1, self._min_branch_tokens)
        chosen = {end}
        if boundaries:
            chosen.update(at for at in boundaries if first <= at <= end)
        if sighting is not None:
            seen = max(seen, sighting.seen_tokens)
            for at, mark in reversed(sighting.marks):
                if at < first:
                    break
                if at <= end and mark.kind in (Kind.BRANCH, Kind.DECLARED):
                    chosen.add(at)
        if first <= seen < n_input and seen <= end and (sighting is None or sighting.branch is not None):
            chosen.add(seen)
        return sorted(chosen)[-MOST_POSITIONS:]


def ordered(positions: list[int], prefill: Prefill) -> list[int]:
    """Distinct positions the pass can checkpoint, ascending."""
    restart, end = prefill.restart_tokens, prefill.end_tokens
    return sorted({at for at in positions if restart < at <= end})


ADMISSIONS: dict[str, Callable[[], AdmissionPolicy]] = {
    "all": AllChunks,
    "every-32": lambda: EveryN(32),
    "marconi": BranchAndEnd,
    "judicious": Judicious,
}
