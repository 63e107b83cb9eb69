"""The memory of entries: one buffer in equal blocks, each of which holds one entry's states or many entries' KV.

A block is as large as the states of one entry, rounded up to whole tokens of KV; so both kinds share the buffer and
there is no ratio to set. What this knows are numbers: a block, or a *slot*, the place of one token's KV in the buffer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import InvariantError

Slots = NDArray[np.int64]


class Blocks:
    """`count` blocks of `block_tokens` slots each; slot s lies in block s // block_tokens."""

    def __init__(self, count: int, block_tokens: int) -> None:
        if count < 0 or block_tokens < 1:
            raise InvariantError(f"blocks need a count >= 0 and slots: {count}, {block_tokens}")
        self.count, self.block_tokens = count, block_tokens
        self._free = list(range(count - 1, -1, -1))
        self._states: set[int] = set()
        self._open: dict[int, Slots] = {}
        """Of each block that holds KV: its free slots, the next one last."""
        self._open_tokens = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def free_tokens(self) -> int:
        """Free slots in blocks that hold KV."""
        return self._open_tokens

    def missing(self, states: int, tokens: int) -> int:
        """Blocks that have to become free before `states` states and `tokens` tokens of KV fit."""
        whole = -(-max(0, tokens - self.free_tokens) // self.block_tokens)
        return max(0, states + whole - self.free_blocks)

    def take_state(self) -> int:
        """A block for the states of one entry; InvariantError if none is free (ask `missing` first)."""
        if not self._free:
            raise InvariantError(f"no block is free, of {self.count}")
        block = self._free.pop()
        self._states.add(block)
        return block

    def take_tokens(self, tokens: int) -> Slots:
        """Slots for `tokens` tokens of KV, [tokens] int64, from the fullest blocks first, so that others run empty."""
        if self.missing(0, tokens):
            raise InvariantError(f"{tokens} tokens do not fit: {self.free_tokens} slots and {self.free_blocks} blocks")
        found: list[Slots] = []
        left = tokens
        for block in sorted(self._open, key=lambda block: (self._open[block].size, block)) if left else ():
            left -= self._cut(block, left, found)
        while left:
            block = self._free.pop()
            first = block * self.block_tokens
            self._open[block] = np.arange(first + self.block_tokens - 1, first - 1, -1, dtype=np.int64)
            self._open_tokens += self.block_tokens
            left -= self._cut(block, left, found)
        return np.concatenate(found) if found else np.empty(0, np.int64)

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
        self._free.append(block)

    def give_tokens(self, slots: Slots) -> None:
        """Take back slots, in any order; a block whose slots are all free holds nothing again."""
        ordered = np.sort(slots)
        cuts = np.flatnonzero(np.diff(ordered // self.block_tokens)) + 1
        for some in np.split(ordered, cuts) if ordered.size else ():
            block = int(some[0]) // self.block_tokens
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
                self._free.append(block)

    def check(self) -> None:
        """Raise InvariantError unless every block is free, holds states or holds KV, and every slot is its block's."""
        blocks = [*self._free, *self._states, *self._open]
        if sorted(blocks) != list(range(self.count)):
            raise InvariantError(f"blocks are lost or doubled: {len(blocks)} of {self.count}")
        for block, free in self._open.items():
            if np.unique(free).size != free.size or (free // self.block_tokens != block).any():
                raise InvariantError(f"free slots of block {block} are wrong: {free.size}")
            if free.size == self.block_tokens:
                raise InvariantError(f"block {block} holds nothing and is not free")
        if sum(free.size for free in self._open.values()) != self._open_tokens:
            raise InvariantError(f"free slots are counted wrongly: {self._open_tokens}")
