"""Least recently used, and the same with superseded checkpoints first."""

from collections import OrderedDict

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.eviction.candidates import Candidate


class RecencyQueues:
    """Dual recency queues with O(1) put, discard and pop: entries that hold a checkpoint, and bare KV leaves.

    The older head of the two is the victim. With `superseded_first`, superseded entries form a third queue that is
    served before both. Entries arrive in order of `touch` except after an unlock or a structural change; those are
    sorted in at the end of a short walk (`_SCAN` entries at most, so such an entry may look up to that much younger).
    """

    _SCAN = 64

    def __init__(self, superseded_first: bool = False) -> None:
        self._superseded_first = superseded_first
        self._queues: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._where: dict[int, int] = {}

    def put(self, candidate: Candidate) -> None:
        queue = 0 if self._superseded_first and candidate.superseded else 1 if candidate.states else 2
        old = self._where.get(candidate.id)
        if old == queue and self._queues[queue][candidate.id] == candidate.touch:
            return
        if old is not None:
            del self._queues[old][candidate.id]
        self._where[candidate.id] = queue
        self._insert(self._queues[queue], candidate.id, candidate.touch)

    def _insert(self, entries: OrderedDict[int, int], candidate_id: int, touch: int) -> None:
        if not entries or entries[next(reversed(entries))] <= touch:
            entries[candidate_id] = touch
            return
        later: list[int] = []
        for other in reversed(entries):
            if entries[other] <= touch or len(later) == self._SCAN:
                break
            later.append(other)
        entries[candidate_id] = touch
        for other in reversed(later):
            entries.move_to_end(other)

    def discard(self, candidate_id: int) -> None:
        queue = self._where.pop(candidate_id, None)
        if queue is not None:
            del self._queues[queue][candidate_id]

    def pop(self, now: float) -> int | None:
        first, states, kv = self._queues
        if first:
            entries = first
        elif states and kv:
            entries = states if next(iter(states.values())) <= next(iter(kv.values())) else kv
        else:
            entries = states or kv
        if not entries:
            return None
        candidate_id, _ = entries.popitem(last=False)
        del self._where[candidate_id]
        return candidate_id

    def __len__(self) -> int:
        return len(self._where)

    def check(self) -> None:
        held = {i: q for q, entries in enumerate(self._queues) for i in entries}
        if held != self._where or sum(len(entries) for entries in self._queues) != len(held):
            raise InvariantError(f"each entry is in exactly one recency queue, entries {len(held)}: {len(self._where)}")
