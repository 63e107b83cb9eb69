"""Entries: segments whose states and KV are kept, what each is worth, and which leaves when memory is short.

An entry is worth what the rest of the cache is worth (`prefix.eviction.forecast`): the odds that its segment comes
again, learned from a history that outlives eviction, times the FLOPs its interior saves, per byte it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.eviction.sampled_index import SampledIndex
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.history import History
from sglang_hybrid.prefix.reuse.table import ReuseTable, age_bin
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.segment.blocks import Blocks, Slots
from sglang_hybrid.segment.keys import Key

COLD, EVICTED, REFUSED = "segment_cold", "segment_evicted", "segment_refused"
"""Why a segment's interior is computed, as `prefix.misses` names it."""

_WORDS = 3  # of 30 bits, by which the history knows a segment


@dataclass(eq=False, slots=True)
class Entry:
    """One segment's interior of `tokens` tokens: its states in `block`, its KV in `slots` ([tokens] int64).

    `making` until the pass that computes it is certain to run. `pins` counts the requests that rely on it.
    """

    key: Key
    tokens: int
    block: int
    slots: Slots
    mark: Mark
    number: int
    making: bool = True
    pins: int = 0
    hits: int = 0
    alive: bool = True


@dataclass(slots=True)
class Counts:
    """What happened to entries since the start."""

    hits: int = 0
    made: int = 0
    evicted: int = 0
    refused: int = 0
    dropped: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes that an entry holds: `state_bytes`, and `token_bytes` for each token of its interior."""

    model: ModelSpec
    state_bytes: int
    token_bytes: int

    def density(self, tokens: int) -> float:
        """FLOPs that a reuse of `tokens` saves, per byte."""
        return float(self.model.prefill_flops(tokens)) / (self.state_bytes + tokens * self.token_bytes) or 1e-300


@dataclass(slots=True)
class SegmentIndex:
    """The entries of one cache, over the memory of `blocks`. Times are in seconds and never run backwards."""

    blocks: Blocks
    costs: Costs
    counts: Counts = field(default_factory=Counts)
    history_marks: int = 100_000
    _entries: dict[Key, Entry] = field(default_factory=dict)
    _numbers: dict[int, Entry] = field(default_factory=dict)
    _next: int = 0
    _table: ReuseTable = field(init=False)
    _history: History = field(init=False)
    _order: SampledIndex = field(init=False)

    def __post_init__(self) -> None:
        self._table = ReuseTable(PRIORS)
        self._history = History(self._table, max_tokens=(_WORDS + 1) * self.history_marks, max_marks=self.history_marks)
        self._order = SampledIndex(self._table.index)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: Key) -> Entry | None:
        """The entry of `key`, also one that is being made."""
        return self._entries.get(key)

    def sight(self, key: Key, now: float) -> tuple[Mark, str]:
        """A request with the segment begins: its mark in the history, and why it would have to be computed."""
        tokens = _words(key)
        known = self._history.observe(tokens, tokens.size, now, (_WORDS,))
        self._history.shorten(tokens, _WORDS)  # no sequence ends here: what stands for the segment is the boundary
        mark = known.declared[0][1]
        entry = self._entries.get(key)
        if entry is not None:
            entry.mark = mark
            if not entry.pins:
                self._offer(entry)
        return mark, EVICTED if known.marks else COLD

    def admit(self, key: Key, tokens: int, mark: Mark, now: float) -> Entry | None:
        """An entry to be made, pinned once, with memory for an interior of `tokens`; None if others are worth more.

        What is worth least goes for it, as far as it is not pinned.
        """
        worth = self._rate(mark, now) * self.costs.density(tokens)
        going: list[Entry] = []
        while self._missing(tokens, going):
            number = self._order.pop(now)
            if number is None:
                break
            going.append(self._numbers[number])
        if self._missing(tokens, going) or any(self._worth(entry, now) > worth for entry in going):
            for entry in going:
                self._offer(entry)
            self.counts.refused += 1
            return None
        for entry in going:
            self.counts.evicted += 1
            self._remove(entry)
        slots = self.blocks.take_tokens(tokens)
        entry = Entry(key, tokens, self.blocks.take_state(), slots, mark, self._next, pins=1)
        self._next += 1
        self._entries[key] = self._numbers[entry.number] = entry
        self.counts.made += 1
        return entry

    def _missing(self, tokens: int, going: list[Entry]) -> bool:
        """Whether there is no room for one more entry even without `going`; their slots may come free in part."""
        states = sum(1 for _ in going)
        slots = sum(entry.tokens for entry in going)
        return self.blocks.missing(1, max(0, tokens - slots)) > states

    def pin(self, entry: Entry) -> None:
        """A request relies on `entry`: it stays until `unpin`."""
        entry.pins += 1
        self._order.discard(entry.number)

    def unpin(self, entry: Entry) -> None:
        """A request relies on `entry` no longer; one that was dropped meanwhile gives its memory back now."""
        if entry.pins < 1:
            raise InvariantError(f"an entry is unpinned as often as it was pinned: {entry.key.hex()}")
        entry.pins -= 1
        if not entry.pins:
            if entry.alive:
                self._offer(entry)
            else:
                self._release(entry)

    def drop(self, entry: Entry) -> None:
        """Forget `entry`; its memory comes back once nobody relies on it."""
        if entry.alive:
            self.counts.dropped += 1
            self._remove(entry)

    def clear(self) -> None:
        """Drop every entry: the model's weights changed, or somebody asked for an empty cache."""
        for entry in list(self._entries.values()):
            self.drop(entry)

    def _remove(self, entry: Entry) -> None:
        entry.alive = False
        del self._entries[entry.key], self._numbers[entry.number]
        self._order.discard(entry.number)
        if not entry.pins:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        self.blocks.give_state(entry.block)
        self.blocks.give_tokens(entry.slots)

    def _offer(self, entry: Entry) -> None:
        """`entry` may leave if memory is short."""
        mark = entry.mark
        self._order.put(entry.number, mark.reuse_class, mark.last_s, self.costs.density(entry.tokens))

    def _rate(self, mark: Mark, now: float) -> float:
        return float(self._table.index[mark.reuse_class, age_bin(now - mark.last_s)])

    def _worth(self, entry: Entry, now: float) -> float:
        return self._rate(entry.mark, now) * self.costs.density(entry.tokens)

    def check(self) -> None:
        """Raise InvariantError unless entries, their order and their memory tell one story."""
        self.blocks.check()
        self._history.check()
        self._order.check()
        held = sum(entry.tokens for entry in self)
        free = self.blocks.free_tokens + self.blocks.free_blocks * self.blocks.block_tokens
        offered = sum(1 for entry in self if not entry.pins)
        if offered != len(self._order):
            raise InvariantError(f"entries that nobody relies on can leave: {offered}, {len(self._order)} in order")
        if any(self._entries.get(entry.key) is not entry for entry in self._numbers.values()):
            raise InvariantError("an entry is known by another number")
        if held + len(self._entries) * self.blocks.block_tokens + free > self.blocks.count * self.blocks.block_tokens:
            raise InvariantError(f"entries hold more than there is: {held} tokens, {len(self._entries)} states")


def _words(key: Key) -> Tokens:
    words = np.frombuffer(key[: 4 * _WORDS], np.int32) & 0x3FFFFFFF
    return np.append(words, np.int32(0)).astype(np.int32)
