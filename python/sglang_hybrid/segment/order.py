"""In which order entries leave when memory is short: what each byte of them is worth, least first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.eviction.sampled_index import SampledIndex
from sglang_hybrid.prefix.reuse.table import ReuseTable, age_bin
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.segment.keys import Key

if TYPE_CHECKING:
    from sglang_hybrid.segment.index import Costs, Entry


class Order(Protocol):
    """The entries that nobody relies on. Times are in seconds."""

    def put(self, entry: Entry) -> None:
        """`entry` may leave; also if it could before and was used since."""
        ...

    def discard(self, entry: Entry) -> None:
        """`entry` may not leave any more; one that could not is ignored."""
        ...

    def pop(self, now: float) -> Entry | None:
        """Take out the entry that is worth least, None if there is none."""
        ...

    def worth(self, key: Key, tokens: int, transitions: int, mark: Mark, now: float) -> float:
        """What the segment of `key` is worth with an interior of `tokens` and so many transitions, kept or not."""
        ...

    def __len__(self) -> int: ...

    def check(self) -> None:
        """Raise InvariantError where it contradicts itself."""
        ...


class ByValue:
    """As the rest of the cache has it (`prefix.eviction.forecast`): the odds of a reuse, learned from all sightings of
    segments, times the FLOPs that it saves, per byte held."""

    def __init__(self, table: ReuseTable, costs: Costs) -> None:
        self._rates, self._costs = table.index, costs
        self._index = SampledIndex(table.index)
        self._entries: dict[int, Entry] = {}

    def put(self, entry: Entry) -> None:
        mark, density = entry.mark, self._costs.density(entry.tokens, entry.transitions.size)
        self._entries[entry.number] = entry
        self._index.put(entry.number, mark.reuse_class, mark.last_s, density)

    def discard(self, entry: Entry) -> None:
        if self._entries.pop(entry.number, None) is not None:
            self._index.discard(entry.number)

    def pop(self, now: float) -> Entry | None:
        number = self._index.pop(now)
        return None if number is None else self._entries.pop(number)

    def worth(self, key: Key, tokens: int, transitions: int, mark: Mark, now: float) -> float:
        odds = float(self._rates[mark.reuse_class, age_bin(now - mark.last_s)])
        return odds * self._costs.density(tokens, transitions)

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        self._index.check()
        if len(self._entries) != len(self._index):
            raise InvariantError(f"every entry that may leave has a price: {len(self._entries)}, {len(self._index)}")
