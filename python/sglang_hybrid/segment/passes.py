"""What one prefill pass of a composed prompt does: the rows it runs, the KV it copies, the segments it jumps over.

    prompt    |--- plain ---|head|..... interior .....|tail|head|... interior ...|tail|-- question --|
    rows      [------- row 0 ----]                    [-- row 1 ]                [------ row 2 ------]
                                  jump, copy                     jump, copy

A row is a run of tokens that are computed in their context. Before a row with a `jump`, the recurrent states of the
request become T S + S_C of that entry, and its convolutions look back on the end of the interior.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.segment.geometry import Range
from sglang_hybrid.segment.index import Entry


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens [start, end) of the prompt, run behind `jump` (None: behind what was run before)."""

    start: int
    end: int
    jump: Entry | None = None

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Copy:
    """KV of tokens [first, first + tokens) of the interior of `entry` goes to position `at` of the prompt and behind.

    The interior is `head` tokens from where its keys count positions from: they turn by `delta` positions.
    """

    entry: Entry
    first: int
    at: int
    tokens: int
    delta: int


@dataclass(frozen=True, slots=True)
class Cold:
    """Tokens [start, end) of the prompt, a whole segment, run by itself to make `entry`; its `interior` stays."""

    entry: Entry
    start: int
    end: int
    interior: Range

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Pass:
    """Tokens [start, end) of a prompt in one pass. `pending` is the entry in or right behind whose interior it ends.

    The states of a pass with a pending entry are those before the interior: the next pass jumps first.
    """

    start: int
    end: int
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...]
    cold: tuple[Cold, ...]
    pending: Entry | None = None

    @property
    def entries(self) -> list[Entry]:
        """The entries that it reads or makes, each once."""
        jumps = [self.pending, *(row.jump for row in self.rows)]
        found = [entry for entry in jumps if entry is not None]
        found += [copy.entry for copy in self.copies]
        found += [cold.entry for cold in self.cold]
        return list({id(entry): entry for entry in found}.values())

    @property
    def composed(self) -> bool:
        """Whether it does anything but run its tokens behind each other."""
        return bool(self.copies or self.cold or any(row.jump is not None for row in self.rows))

    @property
    def run_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(row.tokens for row in self.rows) + sum(cold.tokens for cold in self.cold)

    def saved_at(self, position: int, page: int, window: int) -> int:
        """The deepest place up to `position` where the pass can save a state, at a multiple of `page`; 0 for none.

        That is inside a row, at least the `window` tokens of a convolution behind its start, or at the pass's end.
        """
        for row in reversed(self.rows):
            last = row.end if row.end == self.end and self.pending is None else row.end - 1
            at = min(position, last) // page * page
            if at > row.start and (at - row.start >= window or at == self.end):
                return at
        return 0


def assemble(start: int, end: int, interiors: list[tuple[Range, int, Entry]], before: Entry | None) -> Pass:
    """The pass over [start, end); `interiors` are (range, start of its segment, entry), ascending and apart.

    `before` is the entry that the previous pass left pending. Cold runs are added by the caller.
    """
    rows: list[Row] = []
    copies: list[Copy] = []
    at, jump, pending = start, before, before
    for (low, high), segment_start, entry in interiors:
        if high <= start or low >= end:
            continue
        if low > at or (low == at and jump is not None):
            rows.append(Row(at, low, jump))
        first, last = max(low, start), min(high, end)
        copies.append(Copy(entry, first - low, first, last - first, segment_start))
        at, jump, pending = high, entry, entry
    if at < end:
        rows.append(Row(at, end, jump))
        pending = None
    return Pass(start, end, tuple(rows), tuple(copies), (), pending)
