"""Blocks that are cut into equal slots: a slab allocator, one for each kind of thing that is smaller than a block.

What this knows are numbers; whose memory a slot is, `engine/segments/store.py` knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.segment.source import Source

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Numbering:
    """How slots are numbered: the n-th of block b is b * `span` + n * `step`.

    Numbers count in a unit of bytes that divides a slot and a block, so that one tensor reaches all slots also where a
    block is not a whole number of them.
    """

    span: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Cut:
    """How a block is cut: into `slots`, numbered one after the other if nothing is said.

    Slots are taken of a block that has some only where `least`, or all that are left to place, are free: so what is
    taken at once lies in few blocks, and a bound is known for them (`most_blocks`).
    """

    slots: int
    numbering: Numbering | None = None
    least: int = 1

    def least_blocks(self, count: int) -> int:
        """Blocks that `count` slots fill."""
        return -(-count // self.slots)

    def most_blocks(self, count: int) -> int:
        """Blocks in which `count` slots lie at most that are taken at once."""
        return count // self.least + self.least_blocks(count) + 1 if count else 0


class Slabs:
    """The blocks out of `source` that are `cut` into slots of one kind; `holds` names it for errors."""

    def __init__(self, cut: Cut, source: Source, holds: str) -> None:
        if cut.slots < 1:
            raise InvariantError(f"a block is cut into one slot or more, for {holds}: {cut.slots}")
        self.cut, self.numbering = cut, cut.numbering or Numbering(cut.slots)
        self._source, self.holds = source, holds
        self._open: dict[int, Slots] = {}
        """Of each block: its free slots, the next one last."""
        self._free = 0

    @property
    def free(self) -> int:
        """Free slots in blocks that have others taken."""
        return self._free

    @property
    def taken(self) -> set[int]:
        """The blocks of which slots are taken."""
        return {*self._open}

    def wanted(self, count: int) -> int:
        """Further blocks for `count` slots."""
        if self.cut.least == 1:  # wherever slots are free, they are taken
            return self.cut.least_blocks(max(0, count - self._free))
        return self._places(count)[1]

    def blocks_of(self, slots: Slots) -> list[int]:
        """The blocks in which `slots` lie, each once."""
        found: list[int] = np.unique(slots // self.numbering.span).tolist()
        return found

    def take(self, count: int) -> Slots:
        """`count` slots, [count] int64, of the fullest blocks first, so that others run empty.

        InvariantError if they do not fit (ask `wanted` and hold so many blocks of the source first).
        """
        places, further = self._places(count)
        if further > self._source.free:
            free = f"{self._free} slots and {self._source.free} blocks are free"
            raise InvariantError(f"{count} of {self.holds} do not fit: {free}")
        found: list[Slots] = []
        left = count
        for block, some in places:
            left -= self._cut(block, some, found)
        numbers = np.arange(self.cut.slots - 1, -1, -1, dtype=np.int64) * self.numbering.step
        while left:
            block = self._source.take()
            self._open[block] = block * self.numbering.span + numbers
            self._free += self.cut.slots
            left -= self._cut(block, left, found)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _places(self, count: int) -> tuple[list[tuple[int, int]], int]:
        """Where `count` slots are taken: (block, how many) of those that have some, and how many further blocks."""
        found, left = list[tuple[int, int]](), count
        for block in sorted(self._open, key=lambda block: (self._open[block].size, block)) if left else ():
            free = self._open[block].size
            if left and free >= min(left, self.cut.least):
                found.append((block, min(left, free)))
                left -= min(left, free)
        return found, self.cut.least_blocks(left)

    def _cut(self, block: int, most: int, found: list[Slots]) -> int:
        """Take up to `most` free slots of a block; how many."""
        free = self._open[block]
        count = min(most, free.size)
        if count:
            found.append(free[free.size - count :][::-1])
            self._open[block] = free[: free.size - count]
            self._free -= count
        return count

    def give(self, slots: Slots) -> None:
        """Take back slots, in any order; a block whose slots are all free goes back to the source."""
        ordered = np.sort(slots)
        cuts = np.flatnonzero(np.diff(ordered // self.numbering.span)) + 1
        for some in np.split(ordered, cuts) if ordered.size else ():
            block = int(some[0]) // self.numbering.span
            free = self._open.get(block)
            if free is None:
                raise InvariantError(f"slot {int(some[0])} holds no {self.holds}: block {block}")
            self._open[block] = free = np.concatenate((free, some[::-1]))
            self._free += some.size
            if free.size >= self.cut.slots:
                if np.unique(free).size != self.cut.slots or free.size != self.cut.slots:
                    raise InvariantError(f"a slot of block {block} was given back twice")
                del self._open[block]
                self._free -= self.cut.slots
                self._source.give(block)

    def check(self) -> None:
        """Raise InvariantError unless every free slot is its block's and is counted."""
        span, step = self.numbering.span, self.numbering.step
        for block, free in self._open.items():
            places, rest = np.divmod(free - block * span, step)
            if np.unique(free).size != free.size or rest.any() or ((places < 0) | (places >= self.cut.slots)).any():
                raise InvariantError(f"free slots of block {block} are wrong: {free.size}")
            if free.size == self.cut.slots:
                raise InvariantError(f"block {block} holds nothing and is not free")
        if sum(free.size for free in self._open.values()) != self._free:
            raise InvariantError(f"free slots are counted wrongly: {self._free}")
