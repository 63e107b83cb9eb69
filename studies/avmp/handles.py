"""Virtual handles: a 32-bit name of a page that says its pool and survives the page's move (AVMP 3.1).

    31      28 27                       0
    [ pool tag ][      virtual page     ]

A handle is resolved through one table per pool, each with its pool's page size (the "multi-resolution page table").
Virtual pages are handed out in increasing order and never again, so a handle that outlives its page is an error and
not somebody else's page.
"""

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import ConfigError, InvariantError

TAG_BITS = 4
PAGE_BITS = 32 - TAG_BITS
PAGE_MASK = (1 << PAGE_BITS) - 1

Handles = NDArray[np.uint32]
Pages = NDArray[np.int64]


def tag_of(handles: Handles) -> NDArray[np.int64]:
    """Pool tag of each handle, int64 of the same shape."""
    return handles.astype(np.int64) >> PAGE_BITS


class HandleTable:
    """The page table of one pool: virtual page -> physical page."""

    def __init__(self, tag: int, page_bytes: int) -> None:
        if not 0 <= tag < 1 << TAG_BITS:
            raise ConfigError(f"a handle has room for {1 << TAG_BITS} pools; use a tag below that: {tag}")
        self.tag = tag
        self.page_bytes = page_bytes
        self._physical: Pages = np.full(1024, -1, dtype=np.int64)
        self._names = self._name(1024)  # every handle of the table, made ahead
        self._next = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def live_bytes(self) -> int:
        """Bytes behind all live handles."""
        return self._live * self.page_bytes

    def mint(self, pages: Pages) -> Handles:
        """New handles for physical `pages`, in order. Raises ConfigError when the 28-bit name space is used up."""
        start, stop = self._next, self._next + len(pages)
        if stop > PAGE_MASK + 1:
            raise ConfigError(f"{PAGE_MASK + 1} pages were named; start a new table for pool {self.tag}: {stop}")
        while stop > len(self._physical):
            self._physical = np.concatenate([self._physical, np.full_like(self._physical, -1)])
            self._names = self._name(len(self._physical))
        self._physical[start:stop] = pages
        self._next = stop
        self._live += len(pages)
        return self._names[start:stop]

    def _name(self, count: int) -> Handles:
        names = (np.arange(count, dtype=np.int64) | (self.tag << PAGE_BITS)).astype(np.uint32)
        names.flags.writeable = False  # callers get views
        return names

    def live(self, handles: Handles) -> Handles:
        """The handles among `handles` (all of this pool) that still name a page, in order."""
        alive: NDArray[np.bool_] = self._physical[handles & PAGE_MASK] >= 0
        return np.extract(alive, handles)

    def resolve(self, handles: Handles) -> Pages:
        """Physical pages of live handles of this pool; a foreign or dead handle raises InvariantError."""
        virtual = (handles & PAGE_MASK).astype(np.int64)
        foreign = tag_of(handles) != self.tag
        pages = np.where(foreign | (virtual >= self._next), -1, self._physical[np.minimum(virtual, self._next - 1)])
        if (pages < 0).any():
            bad = int(handles[int(np.argmax(pages < 0))])
            raise InvariantError(f"free and use a handle only while its page is live: {bad:#010x}")
        return pages

    def move(self, handles: Handles, pages: Pages) -> None:
        """Point live handles at other physical `pages`; the handles stay valid (the purpose of the indirection)."""
        self.resolve(handles)
        self._physical[handles & PAGE_MASK] = pages

    def remove(self, handles: Handles) -> Pages:
        """End live `handles` and return the physical pages they named; the caller owns those pages again."""
        if not len(handles):
            return np.empty(0, dtype=np.int64)
        pages = self.resolve(handles)
        self._physical[handles & PAGE_MASK] = -1
        self._live -= len(handles)
        return pages

    def check(self) -> None:
        """Raise InvariantError unless live entries are counted right and name distinct physical pages."""
        live = self._physical[: self._next]
        live = live[live >= 0]
        if len(live) != self._live or len(np.unique(live)) != len(live):
            raise InvariantError(f"handle table of pool {self.tag} counts {self._live} live entries: {len(live)}")
