"""Cached pages that outlive their request: who may be evicted, and at what loss."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import InvariantError


@dataclass(frozen=True)
class Entry:
    """Pages of one pool that a cache keeps under `key`; `value` is the cache's score of having them.

    `by_column` says how many of the pages lie in each column of the pool.
    """

    key: int
    pool: str
    pages: NDArray[np.int64]
    value: float
    size_bytes: int
    by_column: tuple[tuple[int, int], ...]

    @property
    def density(self) -> float:
        """Value per byte, the order of eviction."""
        return self.value / self.size_bytes


class Entries:
    """The entries of all pools. Locked ones (a running request reads them) are never offered for eviction."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._locks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, key: int) -> Entry:
        return self._entries[key]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Keep `entry`; a key in use or an entry without pages is an InvariantError."""
        if entry.key in self._entries or not len(entry.pages):
            raise InvariantError(f"an entry needs a new key and at least one page: {entry.key}")
        self._entries[entry.key] = entry

    def remove(self, key: int) -> Entry:
        """Forget an unlocked entry and return it; its pages are the caller's to free."""
        if self.locked(key) or key not in self._entries:
            raise InvariantError(f"remove only entries that exist and that nobody reads: {key}")
        return self._entries.pop(key)

    def lock(self, key: int) -> None:
        """Protect `key` from eviction until as many unlocks."""
        if key not in self._entries:
            raise InvariantError(f"lock only entries that exist: {key}")
        self._locks[key] = self._locks.get(key, 0) + 1

    def unlock(self, key: int) -> None:
        """Undo one lock."""
        if not self.locked(key):
            raise InvariantError(f"unlock only what was locked: {key}")
        self._locks[key] -= 1
        if not self._locks[key]:
            del self._locks[key]

    def locked(self, key: int) -> bool:
        """Whether somebody reads `key`."""
        return key in self._locks

    def evictable(self) -> list[Entry]:
        """Unlocked entries, least value per byte first; ties by key."""
        unlocked = (entry for key, entry in self._entries.items() if key not in self._locks)
        return sorted(unlocked, key=lambda entry: (entry.density, entry.key))

    def check(self) -> None:
        """Raise InvariantError if a lock has no entry or a page belongs to two entries of a pool."""
        if not set(self._locks) <= set(self._entries):
            raise InvariantError(f"locks without entries: {set(self._locks) - set(self._entries)}")
        for pool in {entry.pool for entry in self}:
            pages = np.concatenate([entry.pages for entry in self if entry.pool == pool])
            if len(np.unique(pages)) != len(pages):
                raise InvariantError(f"two entries of pool {pool!r} hold the same page: {len(pages)}")
