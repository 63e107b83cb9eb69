"""Entries that passes read or write stay until the passes have run, for their memory may become something else's."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_hybrid.segment.index import Entry, SegmentIndex


class Leases:
    """Pins of the entries of `index` that passes rely on which were decided on and may not have run.

    `turn` is called when a scheduler begins to look for its next batch. Of those before it, `ahead` may not have run
    yet: none in a plain loop, one where a batch is put together while another runs.
    """

    def __init__(self, index: SegmentIndex, ahead: int = 0) -> None:
        self._index = index
        self._ahead = ahead
        self._fresh: list[Entry] = []
        self._past: list[list[Entry]] = []

    def hold(self, entries: Iterable[Entry]) -> None:
        """A pass of the batch that is put together relies on `entries`."""
        for entry in entries:
            self._index.pin(entry)
            self._fresh.append(entry)

    def turn(self) -> None:
        """The next batch is looked for."""
        self._past.append(self._fresh)
        self._fresh = []
        while len(self._past) > self._ahead:
            self._release(self._past.pop(0))

    def ran(self) -> bool:
        """Every batch before the one that is put together has run; whether anything was held for them."""
        held = any(self._past)
        while self._past:
            self._release(self._past.pop(0))
        return held

    def end(self) -> None:
        """Nothing runs and nothing is to run."""
        self.turn()
        self.ran()

    def _release(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._index.unpin(entry)
