"""The memory of entries: equal blocks, each of which holds one entry's states or many entries' KV.

A block is as large as the states of one entry, rounded up to whole tokens of KV or to what memory is mapped in; so
both kinds share the blocks and there is no ratio to set. What this knows are numbers: a block, or a *slot*, the place
of one token's KV.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.segment.source import FreeList, Source

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Numbering:
    """How slots are numbered: the n-th of block b is b * `span` + n * `step`.

    Numbers count in a unit of bytes that divides a slot and a block, so that one tensor reaches all slots also where a
    block is not a whole number of them.
    """

    span: int
    step: int = 1


class Blocks:
    """`count` blocks of `block_tokens` slots each, out of `source`; a fixed number of them if nothing is said.

    KV goes into blocks that hold KV already only where `least` slots, or all that is left to place, find room: so what
    an entry holds lies in few blocks, and a bound is known for it (`most_blocks`).
    """

    def __init__(
        self,
        count: int,
        block_tokens: int,
        source: Source | None = None,
        numbering: Numbering | None = None,
        least: int = 1,
    ) -> None:
        if count < 0 or block_tokens < 1:
            raise InvariantError(f"blocks need a count >= 0 and slots: {count}, {block_tokens}")
        self.count, self.block_tokens = count, block_tokens
        self.numbering = numbering or Numbering(block_tokens)
        self._least = least
        self._source = source or FreeList(count)
        self._states: set[int] = set()
        self._open: dict[int, Slots] = {}
        """Of each block that holds KV: its free slots, the next one last."""
        self._open_tokens = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that could be had without evicting anything."""
        return self._source.free

    @property
    def free_tokens(self) -> int:
        """Free slots in blocks that hold KV."""
        return self._open_tokens

    @property
    def taken(self) -> set[int]:
        """The blocks that hold something."""
        return self._states | self._open.keys()

    def wanted(self, states: int, tokens: int) -> int:
        """Further blocks for `states` states and `tokens` tokens of KV."""
        return states + self._places(tokens)[1]

    def missing(self, states: int, tokens: int) -> int:
        """Blocks that have to become free before `states` states and `tokens` tokens of KV fit."""
        return max(0, self.wanted(states, tokens) - self.free_blocks)

    def crowded(self, states: int, tokens: int) -> bool:
        """Whether so much needs blocks that are taken, however much memory there is."""
        return self.wanted(states, tokens) > self._source.left

    def hold(self, states: int, tokens: int) -> bool:
        """Have memory for `states` states and `tokens` tokens of KV, which are taken next; whether it could be had."""
        return self._source.hold(self.wanted(states, tokens))

    def most_blocks(self, tokens: int) -> int:
        """Blocks in which KV of `tokens` tokens lies at most."""
        return tokens // self._least + -(-tokens // self.block_tokens) + 1

    def blocks_of(self, slots: Slots) -> list[int]:
        """The blocks in which `slots` lie, each once."""
        found: list[int] = np.unique(slots // self.numbering.span).tolist()
        return found

    def take_state(self) -> int:
        """A block for the states of one entry; InvariantError if none is held or free (ask `hold` first)."""
        block = self._source.take()
        self._states.add(block)
        return block

    def take_tokens(self, tokens: int) -> Slots:
        """Slots for `tokens` tokens of KV, [tokens] int64, from the fullest blocks first, so that others run empty."""
        if self.missing(0, tokens):
            raise InvariantError(f"{tokens} tokens do not fit: {self.free_tokens} slots and {self.free_blocks} blocks")
        found: list[Slots] = []
        left = tokens
        for block, count in self._places(tokens)[0]:
            left -= self._cut(block, count, found)
        numbers = np.arange(self.block_tokens - 1, -1, -1, dtype=np.int64) * self.numbering.step
        while left:
            block = self._source.take()
            self._open[block] = block * self.numbering.span + numbers
            self._open_tokens += self.block_tokens
            left -= self._cut(block, left, found)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _places(self, tokens: int) -> tuple[list[tuple[int, int]], int]:
        """Where `tokens` tokens of KV go: (block, how many) of those that hold KV, and the number of further blocks."""
        found, left = list[tuple[int, int]](), tokens
        for block in sorted(self._open, key=lambda block: (self._open[block].size, block)) if left else ():
            free = self._open[block].size
            if left and free >= min(left, self._least):
                found.append((block, min(left, free)))
                left -= min(left, free)
        return found, -(-left // self.block_tokens)

    def _cut(self, block: int, most: int, found: list[Slots]) -> int:
        """Take up to `most` free slots of an open block; how many."""
        free = self._open[block]
        count = min(most, free.size)
        if count:
            found.append(free[free.size - count :][::-1])
            self._open[block] = free[: free.size - count]
            self._open_tokens -= count
        return count

    def give_state(self, block: int) -> None:
        """Take back a block of states."""
        if block not in self._states:
            raise InvariantError(f"block {block} holds no states")
        self._states.remove(block)
        self._source.give(block)

    def give_tokens(self, slots: Slots) -> None:
        """Take back slots, in any order; a block whose slots are all free holds nothing again."""
        ordered = np.sort(slots)
        cuts = np.flatnonzero(np.diff(ordered // self.numbering.span)) + 1
        for some in np.split(ordered, cuts) if ordered.size else ():
            block = int(some[0]) // self.numbering.span
            free = self._open.get(block)
            if free is None:
                raise InvariantError(f"slot {int(some[0])} holds no KV: block {block}")
            self._open[block] = free = np.concatenate((free, some[::-1]))
            self._open_tokens += some.size
            if free.size >= self.block_tokens:
                if np.unique(free).size != self.block_tokens or free.size != self.block_tokens:
                    raise InvariantError(f"a slot of block {block} was given back twice")
                del self._open[block]
                self._open_tokens -= self.block_tokens
                self._source.give(block)

    def check(self) -> None:
        """Raise InvariantError unless every block is free, holds states or holds KV, and every slot is its block's."""
        self._source.check([*self._states, *self._open])
        span, step = self.numbering.span, self.numbering.step
        for block, free in self._open.items():
            places, rest = np.divmod(free - block * span, step)
            if np.unique(free).size != free.size or rest.any() or ((places < 0) | (places >= self.block_tokens)).any():
                raise InvariantError(f"free slots of block {block} are wrong: {free.size}")
            if free.size == self.block_tokens:
                raise InvariantError(f"block {block} holds nothing and is not free")
        if sum(free.size for free in self._open.values()) != self._open_tokens:
            raise InvariantError(f"free slots are counted wrongly: {self._open_tokens}")
