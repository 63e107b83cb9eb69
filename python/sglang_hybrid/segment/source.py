"""Where blocks come from: a fixed number of them, or a pool of an elastic budget, in which other pools compete."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.memory.supply import AtHand, PageSupply


class Source(Protocol):
    """Blocks by number. `hold` comes before `take`: what is held is there, whoever else takes memory meanwhile."""

    @property
    def free(self) -> int:
        """Blocks that could be had now without evicting anything."""
        ...

    @property
    def left(self) -> int:
        """Blocks that are not taken, had they memory or not: where more are wanted, one that is taken has to go."""
        ...

    def hold(self, count: int) -> bool:
        """Have memory for the next `count` blocks; whether it could be had."""
        ...

    def take(self) -> int:
        """A block; InvariantError if none is held."""
        ...

    def give(self, block: int) -> None:
        """Take `block` back."""
        ...

    def check(self, taken: Collection[int]) -> None:
        """Raise InvariantError unless exactly the blocks `taken`, which are distinct, are with the caller."""
        ...


class FreeList:
    """`count` blocks that have memory for life; the one that came back last is taken next."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def left(self) -> int:
        return len(self._free)

    def hold(self, count: int) -> bool:
        return count <= len(self._free)

    def take(self) -> int:
        if not self._free:
            raise InvariantError(f"no block is free, of {self._count}")
        return self._free.pop()

    def give(self, block: int) -> None:
        self._free.append(block)

    def check(self, taken: Collection[int]) -> None:
        if sorted([*self._free, *taken]) != list(range(self._count)):
            raise InvariantError(f"blocks are lost or doubled: {len(self._free) + len(taken)} of {self._count}")


class PooledBlocks:
    """The pages of a pool, one block each: a block has memory while it is taken, and the budget's other pools else."""

    def __init__(self, supply: PageSupply) -> None:
        self._supply = supply

    @property
    def free(self) -> int:
        return self._supply.available

    @property
    def left(self) -> int:
        layout = self._supply.pool.layout
        return layout.pages - layout.pinned_pages - self._supply.taken

    def hold(self, count: int) -> bool:
        return self._supply.reserve(count)

    def take(self) -> int:
        if not len(self._supply.held):
            raise InvariantError(f"hold a block before it is taken; taken: {self._supply.taken}")
        pages = self._supply.hand_out(1)
        assert pages is not None
        return int(pages[0])

    def give(self, block: int) -> None:
        self._supply.take_back(AtHand(np.array([block], dtype=np.int64)), 1)

    def check(self, taken: Collection[int]) -> None:
        if self._supply.taken != len(taken) or len({*taken}) != len(taken):
            raise InvariantError(f"the pool has other blocks taken, {self._supply.taken}: {len(taken)}")
