"""Entries that passes read or write stay until the passes have run, for their memory may become something else's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from sglang_hybrid.segment.index import Entry, SegmentIndex

Item = TypeVar("Item")


class Rounds(Generic[Item]):
    """What waits for the passes that a scheduler decided on, round by round.

    `turn` is called when it begins to look for its next batch. Of the passes before, those of `ahead` rounds may not
    have run yet: none in a plain loop, one where a batch is put together while another runs.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._fresh: list[Item] = []
        self._past: list[list[Item]] = []

    def add(self, item: Item) -> None:
        """`item` waits for a pass of the batch that is put together."""
        self._fresh.append(item)

    def turn(self) -> list[Item]:
        """The next batch is looked for: what waited for passes that have run by now."""
        self._past.append(self._fresh)
        self._fresh = []
        found: list[Item] = []
        while len(self._past) > self._ahead:
            found += self._past.pop(0)
        return found

    def ran(self) -> list[Item]:
        """Every batch before the one that is put together has run: what waited for them."""
        found = [item for items in self._past for item in items]
        self._past.clear()
        return found


class Leases:
    """Pins of the entries of `index` that passes rely on which were decided on and may not have run; `Rounds`."""

    def __init__(self, index: SegmentIndex, ahead: int = 0) -> None:
        self._index, self._rounds = index, Rounds[Entry](ahead)

    def hold(self, entries: Iterable[Entry]) -> None:
        """A pass of the batch that is put together relies on `entries`."""
        for entry in entries:
            self._index.pin(entry)
            self._rounds.add(entry)

    def turn(self) -> None:
        """The next batch is looked for."""
        self._release(self._rounds.turn())

    def ran(self) -> bool:
        """Every batch before the one that is put together has run; whether anything was held for them."""
        held = self._rounds.ran()
        self._release(held)
        return bool(held)

    def end(self) -> None:
        """Nothing runs and nothing is to run."""
        self.turn()
        self.ran()

    def _release(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._index.unpin(entry)
