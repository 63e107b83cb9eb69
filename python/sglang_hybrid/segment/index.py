"""Entries: segments whose states and KV are kept, and which leave for others when memory is short.

How often segments come is learned from a history that outlives eviction; `order` says what an entry is worth by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.history import History
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.mark import LATER, Mark
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.keys import Key
from sglang_hybrid.segment.order import ByValue, Order
from sglang_hybrid.segment.slabs import Slots

COLD, EVICTED, REFUSED = "segment_cold", "segment_evicted", "segment_refused"
"""Why a segment's interior is computed, as `prefix.misses` names it."""

_WORDS = 3  # of 30 bits, by which the history knows a segment


@dataclass(eq=False, slots=True)
class Entry:
    """One segment's interior of `tokens` tokens: its states in `block`, its KV in `slots` ([tokens] int64), and its
    heads' transitions in the slots `transitions`, all of them until it is known which vanish (`SegmentIndex.settle`).

    `making` until the pass that computes it is certain to run; `void` if that never will. `pins` counts the requests
    that rely on it. `alive` while it can be found. `owed` is not None while the request for which it was made ahead, or
    fetched, has not come to it: the reason that this one tells. The history knows of that request already.
    """

    key: Key
    tokens: int
    block: int
    slots: Slots
    transitions: Slots
    mark: Mark
    number: int
    making: bool = True
    pins: int = 0
    hits: int = 0
    alive: bool = True
    void: bool = False
    owed: str | None = None


@dataclass(slots=True)
class Counts:
    """What happened to entries since the start."""

    hits: int = 0
    made: int = 0
    evicted: int = 0
    refused: int = 0
    dropped: int = 0
    fetched: int = 0
    handed_out: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes that an entry holds on each of `ranks`: `state_bytes`, `token_bytes` for each token of its interior, and
    `transition_bytes` for each of its `transitions` that does not vanish."""

    model: ModelSpec
    state_bytes: int
    token_bytes: int
    ranks: int = 1
    transitions: int = 0
    transition_bytes: int = 0

    def density(self, tokens: int, transitions: int = 0) -> float:
        """FLOPs that a reuse of `tokens` saves, per byte, if so many transitions are kept."""
        return float(self.model.prefill_flops(tokens)) / (self.ranks * self.held(tokens, transitions)) or 1e-300

    def held(self, tokens: int, transitions: int = 0) -> int:
        """Bytes of an entry with an interior of `tokens` and `transitions` that are kept, on one rank."""
        return self.state_bytes + tokens * self.token_bytes + transitions * self.transition_bytes


class Rivals(Protocol):
    """What shares its memory with entries, such as KV and states of prefixes."""

    def least(self, now: float) -> float | None:
        """What a byte of it is worth that would go next, as `Order.worth` has it; None if nothing can go."""
        ...

    def evict(self) -> bool:
        """Evict that; whether any memory came free."""
        ...


@dataclass(slots=True)
class SegmentIndex:
    """The entries of one cache, over the memory of `blocks`. Times are in seconds and never run backwards.

    Where `rivals` share the memory, what is worth least of both goes for a new entry, and `give_way` is asked when they
    need some.
    """

    blocks: Blocks
    costs: Costs
    counts: Counts = field(default_factory=Counts)
    history_marks: int = 100_000
    order: Callable[[ReuseTable, Costs], Order] = ByValue
    rivals: Rivals | None = None
    _pinned: dict[int, Entry] = field(default_factory=dict)
    _entries: dict[Key, Entry] = field(default_factory=dict)
    _next: int = 0
    _settled: int = 0
    _kept: int = 0
    _history: History = field(init=False)
    _order: Order = field(init=False)

    def __post_init__(self) -> None:
        table = ReuseTable(PRIORS)
        self._history = History(table, max_tokens=(_WORDS + 1) * self.history_marks, max_marks=self.history_marks)
        self._order = self.order(table, self.costs)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: Key) -> Entry | None:
        """The entry of `key`, also one that is being made."""
        return self._entries.get(key)

    def sight(self, key: Key, now: float) -> Mark:
        """A request with the segment begins: its mark in the history. Once a request, or the odds are wrong."""
        tokens = _words(key)
        known = self._history.observe(tokens, tokens.size, now, (_WORDS,))
        self._history.shorten(tokens, _WORDS)  # no sequence ends here: what stands for the segment is the boundary
        mark = known.declared[0][1]
        if not known.marks:  # it lies near an end of the history's sequence, but is no end of a conversation
            mark.site = LATER
            mark.reuse_class = self._history.class_of(mark)
        entry = self._entries.get(key)
        if entry is not None:
            entry.mark = mark
            if not entry.pins:
                self._order.put(entry)
        return mark

    def admit(self, key: Key, tokens: int, mark: Mark, now: float) -> Entry | None:
        """An entry to be made, pinned once, with memory for an interior of `tokens`; None if others are worth more.

        What is worth least goes for it, as far as it is not pinned.
        """
        if not self.blocks.ever_fit(tokens, self.costs.transitions):
            return None
        worth = self._order.worth(key, tokens, self.usual_transitions, mark, now)
        cleared = self._clear(tokens, worth, now) if self.rivals is None else self._contest(tokens, worth, now)
        if not cleared or not self.blocks.hold(1, tokens, self.costs.transitions):
            return None
        slots, transitions = self.blocks.kv.take(tokens), self.blocks.transitions.take(self.costs.transitions)
        made = Entry(key, tokens, self.blocks.take_state(), slots, transitions, mark, self._next, pins=1)
        self._next += 1
        self._entries[key] = self._pinned[made.number] = made
        mark.evicted = False
        return made

    @property
    def next_number(self) -> int:
        """The number of the entry that is made next; those before have lower ones."""
        return self._next

    @property
    def transitions_kept(self) -> float | None:
        """The share of transitions that did not vanish, of all entries so far; None while none is known."""
        told = self._settled * self.costs.transitions
        return self._kept / told if told else None

    @property
    def usual_transitions(self) -> int:
        """Transitions that an entry keeps in the mean, all of them while none is known."""
        share = self.transitions_kept
        return self.costs.transitions if share is None else round(share * self.costs.transitions)

    def settle(self, entry: Entry, kept: int) -> None:
        """`entry` was made, and only the first `kept` of its transitions do not vanish: the others' memory comes back.

        Nothing happens to an entry that has given all of its memory back.
        """
        if not 0 <= kept <= self.costs.transitions:
            raise InvariantError(f"an entry keeps 0 to {self.costs.transitions} transitions: {kept}")
        self._settled, self._kept = self._settled + 1, self._kept + kept
        vanished, entry.transitions = entry.transitions[kept:], entry.transitions[:kept]
        self.blocks.transitions.give(vanished)
        if entry.alive and not entry.pins:
            self._order.put(entry)

    def _clear(self, tokens: int, worth: float, now: float) -> bool:
        """Evict what is worth less than `worth` until `tokens` more fit, or nothing; whether they do."""
        going: list[Entry] = []
        while self._missing(tokens, going):
            entry = self._order.pop(now)
            if entry is not None:
                going.append(entry)
            if entry is None or self._worth(entry, now) > worth:
                for entry in going:
                    self._order.put(entry)
                return False
        for entry in going:
            self._evict(entry)
        return True

    def _contest(self, tokens: int, worth: float, now: float) -> bool:
        """Evict what is worth least, of entries and rivals, until `tokens` more fit; whether they do.

        One by one, for what comes free of a rival is not known before it goes. If something worth more than `worth`
        would be next, what went was worth less and its memory is free. Where blocks are short and memory is not, only
        entries are of help.
        """
        rivals = self.rivals
        while self.blocks.missing(1, tokens, self.costs.transitions):
            crowded = self.blocks.crowded(1, tokens, self.costs.transitions)
            other = None if rivals is None or crowded else rivals.least(now)
            if self.give_way(worth if other is None else min(worth, other), now):
                continue
            if other is None or other > worth:
                return False
            assert rivals is not None
            if not rivals.evict() and not self.give_way(worth, now):
                return False
        return True

    def give_way(self, worth: float, now: float) -> int:
        """Evict the entry that is worth least if a byte of it is worth no more than `worth`; the bytes, 0 if none is.

        What it held may come free in part: KV and transitions share blocks, states never do.
        """
        entry = self._order.pop(now)
        if entry is None:
            return 0
        if self._worth(entry, now) > worth:
            self._order.put(entry)
            return 0
        held = self.held(entry)
        self._evict(entry)
        return held

    def _worth(self, entry: Entry, now: float) -> float:
        return self._order.worth(entry.key, entry.tokens, entry.transitions.size, entry.mark, now)

    def _evict(self, entry: Entry) -> None:
        self.counts.evicted += 1
        entry.mark.evicted = True
        self._remove(entry)

    def unpinned_blocks(self) -> list[int]:
        """The blocks that would come free if all went that nobody relies on, ascending."""
        kept = {entry.block for entry in self._pinned.values()}
        for entry in self._pinned.values():
            kept.update(self.blocks.kv.blocks_of(entry.slots))
            kept.update(self.blocks.transitions.blocks_of(entry.transitions))
        return sorted(self.blocks.taken - kept)

    def _missing(self, tokens: int, going: list[Entry]) -> bool:
        """Whether there is no room for one more entry even without `going`; their slots may come free in part."""
        tokens -= sum(entry.tokens for entry in going)
        transitions = self.costs.transitions - sum(entry.transitions.size for entry in going)
        return self.blocks.missing(1, max(0, tokens), max(0, transitions)) > len(going)

    def held(self, entry: Entry) -> int:
        """Bytes that `entry` holds on one rank."""
        return self.costs.held(entry.tokens, entry.transitions.size)

    def pin(self, entry: Entry) -> None:
        """A request relies on `entry`: it stays until `unpin`."""
        entry.pins += 1
        self._pinned[entry.number] = entry
        self._order.discard(entry)

    def unpin(self, entry: Entry) -> None:
        """A request relies on `entry` no longer; one that was dropped meanwhile gives its memory back now."""
        if entry.pins < 1:
            raise InvariantError(f"an entry is unpinned as often as it was pinned: {entry.key.hex()}")
        entry.pins -= 1
        if not entry.pins:
            del self._pinned[entry.number]
            if entry.alive:
                self._order.put(entry)
            else:
                self._release(entry)

    def drop(self, entry: Entry) -> None:
        """Forget `entry`; its memory comes back once nobody relies on it."""
        if entry.alive:
            self.counts.dropped += 1
            self._remove(entry)

    def abandon(self, entry: Entry) -> None:
        """The pass that was to make `entry` does not run. Whoever relies on it has to begin anew."""
        entry.void = True
        if entry.alive:
            self._remove(entry)

    def clear(self) -> None:
        """Drop every entry: the model's weights changed, or somebody asked for an empty cache."""
        for entry in list(self._entries.values()):
            self.drop(entry)
        self._settled = self._kept = 0

    def _remove(self, entry: Entry) -> None:
        entry.alive = False
        del self._entries[entry.key]
        self._order.discard(entry)
        if not entry.pins:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        self.blocks.give_state(entry.block)
        self.blocks.kv.give(entry.slots)
        self.blocks.transitions.give(entry.transitions)
        entry.transitions = entry.transitions[:0]  # whoever settles it later finds nothing

    def check(self) -> None:
        """Raise InvariantError unless entries, their order and their memory tell one story."""
        self.blocks.check()
        self._history.check()
        self._order.check()
        offered = sum(1 for entry in self if not entry.pins)
        if offered != len(self._order):
            raise InvariantError(f"entries that nobody relies on can leave: {offered}, {len(self._order)} in order")
        if any(not entry.pins or self._pinned.get(number) is not entry for number, entry in self._pinned.items()):
            raise InvariantError(f"pinned entries are counted wrongly: {len(self._pinned)}")
        if sum(1 for entry in self if entry.pins) > len(self._pinned):
            raise InvariantError(f"a pinned entry is not known as one: {len(self._pinned)} are")
        if any(not entry.alive or entry.void or entry.key != key for key, entry in self._entries.items()):
            raise InvariantError(f"what was given up is found no more: {len(self._entries)} entries")
        held = [*self._entries.values(), *(entry for entry in self._pinned.values() if not entry.alive)]
        for slabs, taken in (
            (self.blocks.kv, sum(entry.slots.size for entry in held)),
            (self.blocks.transitions, sum(entry.transitions.size for entry in held)),
        ):
            if taken != len(slabs.taken) * slabs.cut.slots - slabs.free:
                raise InvariantError(f"entries hold other slots than are taken: {taken} of {slabs.holds}")


def _words(key: Key) -> Tokens:
    words = np.frombuffer(key[: 4 * _WORDS], np.int32) & 0x3FFFFFFF
    return np.append(words, np.int32(0)).astype(np.int32)
