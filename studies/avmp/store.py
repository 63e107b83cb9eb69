"""A store of equal pages that changes size only at its high end: AVMP's KVPagesStore and SSMBlocksStore.

The backing tensor spans the whole budget from the start; capacity is a counter (AVMP 3.2: oversized at the start).
The order of the free list is the released one, because which page is taken decides whether the tail can shrink.
"""

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import InvariantError

Pages = NDArray[np.int64]
_NONE: Pages = np.empty(0, dtype=np.int64)


class TailStore:
    """Pages 0..capacity-1 on one stack; `limit` is the highest capacity the reserved memory allows."""

    def __init__(self, limit: int, capacity: int) -> None:
        self.limit = limit
        self.capacity = capacity
        self._stack: Pages = np.empty(limit, dtype=np.int64)
        self._stack[:capacity] = np.arange(capacity - 1, -1, -1)
        self._top = capacity
        self._used = np.zeros(limit, dtype=bool)

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return self._top

    @property
    def free_fraction(self) -> float:
        """Share of the capacity that is free; 0 for an empty store."""
        return self._top / self.capacity if self.capacity else 0.0

    def take(self, count: int) -> Pages | None:
        """`count` pages from the top of the stack, or None. A failed take reverses the stack.

        The released allocator takes pages one by one and gives them back in the order it took them.
        """
        if count > self._top:
            self._stack[: self._top] = self._stack[: self._top][::-1].copy()
            return None
        self._top -= count
        pages = self._stack[self._top : self._top + count][::-1].copy()
        self._used[pages] = True
        return pages

    def give(self, pages: Pages) -> None:
        """Push `pages` back in order; giving a page nobody holds raises InvariantError."""
        if not self._used[pages].all():
            raise InvariantError(f"a page was freed twice: {int(pages[int(np.argmin(self._used[pages]))])}")
        self._used[pages] = False
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)

    def resize(self, capacity: int) -> bool:
        """Set the capacity. False, and nothing changed, if a used page lies above it or the memory does not reach."""
        if not 0 <= capacity <= self.limit or self._used[capacity:].any():
            return False
        if capacity < self.capacity:
            kept = self._stack[: self._top]
            kept = kept[kept < capacity]
        else:
            kept = np.concatenate([self._stack[: self._top], np.arange(self.capacity, capacity)])
        self._stack[: len(kept)] = kept
        self._top = len(kept)
        self.capacity = capacity
        return True

    def check(self) -> None:
        """Raise InvariantError unless free and used pages partition the capacity."""
        free = self._stack[: self._top]
        whole = np.concatenate([free, np.flatnonzero(self._used)])
        if not np.array_equal(np.sort(whole), np.arange(self.capacity)):
            raise InvariantError(f"free and used pages do not partition the store: {self.capacity}")
