"""Orders in which segments leave, to compare the server's with: the paper's, and one that knows all later requests."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.segment.index import Costs, Entry
from sglang_hybrid.segment.keys import Key


class ByRecency:
    """The least recently used goes, and whatever comes is kept: LRU, as HYPIC has it."""

    def __init__(self, table: ReuseTable, costs: Costs) -> None:
        self._entries: OrderedDict[int, Entry] = OrderedDict()

    def put(self, entry: Entry) -> None:
        self._entries[entry.number] = entry
        self._entries.move_to_end(entry.number)

    def discard(self, entry: Entry) -> None:
        self._entries.pop(entry.number, None)

    def pop(self, now: float) -> Entry | None:
        return self._entries.popitem(last=False)[1] if self._entries else None

    def worth(self, key: Key, tokens: int, transitions: int, mark: Mark, now: float) -> float:
        return mark.last_s

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        if any(entry.number != number for number, entry in self._entries.items()):
            raise InvariantError(f"an entry is known by another number: {len(self)} entries")


class ByFuture:
    """What saves the fewest FLOPs per byte and second to its next use goes: a heuristic, no bound."""

    def __init__(self, uses: Mapping[Key, Sequence[float]], costs: Costs) -> None:
        self._uses, self._costs = uses, costs
        self._entries: dict[int, Entry] = {}

    def put(self, entry: Entry) -> None:
        self._entries[entry.number] = entry

    def discard(self, entry: Entry) -> None:
        self._entries.pop(entry.number, None)

    def pop(self, now: float) -> Entry | None:
        if not self._entries:
            return None
        worth = {
            number: self.worth(e.key, e.tokens, e.transitions.size, e.mark, now) for number, e in self._entries.items()
        }
        return self._entries.pop(min(worth, key=lambda number: (worth[number], number)))

    def worth(self, key: Key, tokens: int, transitions: int, mark: Mark, now: float) -> float:
        times = self._uses[key]
        later = bisect_right(times, now)
        return self._costs.density(tokens, transitions) / (times[later] - now) if later < len(times) else 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        if any(entry.key not in self._uses for entry in self._entries.values()):
            raise InvariantError(f"an entry comes that no request brings: {len(self)} entries")


def knowing(uses: Mapping[Key, Sequence[float]]) -> Callable[[ReuseTable, Costs], ByFuture]:
    """The order for a trace whose segments come at these times, ascending seconds by key."""
    return lambda table, costs: ByFuture(uses, costs)
