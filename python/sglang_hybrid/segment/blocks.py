"""The memory of entries: equal blocks, each of which holds one entry's states, or KV or transitions of many entries.

A block is as large as the states of one entry without its transitions, rounded up to whole tokens of KV or to what
memory is mapped in. All three kinds share the blocks, so there is no ratio to set.
"""

from __future__ import annotations

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.segment.slabs import Cut, Slabs
from sglang_hybrid.segment.source import FreeList, Source


class Blocks:
    """`count` blocks out of `source`, a fixed number of them if nothing is said.

    `kv` says how one is cut into slots of one token each, `transitions` how into slots of one matrix each.
    """

    def __init__(self, count: int, kv: Cut, source: Source | None = None, transitions: Cut | None = None) -> None:
        if count < 0:
            raise InvariantError(f"there are 0 blocks or more: {count}")
        self.count, self._source = count, source or FreeList(count)
        self.kv = Slabs(kv, self._source, "KV")
        self.transitions = Slabs(transitions or Cut(1), self._source, "transitions")
        self._states: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that could be had without evicting anything."""
        return self._source.free

    @property
    def taken(self) -> set[int]:
        """The blocks that hold something."""
        return self._states | self.kv.taken | self.transitions.taken

    def wanted(self, states: int, tokens: int, transitions: int = 0) -> int:
        """Further blocks for `states` states, KV of `tokens` tokens and `transitions` transitions."""
        return states + self.kv.wanted(tokens) + self.transitions.wanted(transitions)

    def missing(self, states: int, tokens: int, transitions: int = 0) -> int:
        """Blocks that have to become free before so much fits."""
        return max(0, self.wanted(states, tokens, transitions) - self.free)

    def crowded(self, states: int, tokens: int, transitions: int = 0) -> bool:
        """Whether so much needs blocks that are taken, however much memory there is."""
        return self.wanted(states, tokens, transitions) > self._source.left

    def filled(self, states: int, tokens: int, transitions: int = 0) -> int:
        """Blocks that so much takes where nothing else is."""
        return states + self.kv.cut.least_blocks(tokens) + self.transitions.cut.least_blocks(transitions)

    def ever_fit(self, tokens: int, transitions: int) -> bool:
        """Whether an entry of so much, with its states, fits where nothing else is."""
        return self.filled(1, tokens, transitions) <= self.count

    def hold(self, states: int, tokens: int, transitions: int = 0) -> bool:
        """Have memory for so much, which is taken next; whether it could be had."""
        return self._source.hold(self.wanted(states, tokens, transitions))

    def take_state(self) -> int:
        """A block for the states of one entry; InvariantError if none is held or free (ask `hold` first)."""
        block = self._source.take()
        self._states.add(block)
        return block

    def give_state(self, block: int) -> None:
        """Take back a block of states."""
        if block not in self._states:
            raise InvariantError(f"block {block} holds no states")
        self._states.remove(block)
        self._source.give(block)

    def check(self) -> None:
        """Raise InvariantError unless every block is free or holds one kind, and every slot is its block's."""
        self._source.check([*self._states, *self.kv.taken, *self.transitions.taken])
        self.kv.check()
        self.transitions.check()
