"""How many pages of each column nobody reads, kept on the host while SGLang's tree changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakIdKeyDictionary

from sglang_hybrid.memory.pool import Pool

_Counts = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Columns, and how many pages lie in each."""


class EvictableColumns:
    """The evictable pages of one pool. A page is `page_tokens` slots, all of one node.

    SGLang gives a node another tensor when its slots change, and never changes the numbers in one. So each tensor is
    read once, all new ones together, and what was counted is taken off again when its node is locked or gone.
    """

    def __init__(self, pool: Pool, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._column_pages = pool.layout.column_pages
        self._counts = np.zeros(pool.layout.columns, dtype=np.int64)
        self._counted: dict[int, torch.Tensor] = {}  # by identity; held here, so that no other gets it
        self._known = WeakIdKeyDictionary()  # tensor -> _Counts, of locked nodes too

    def follow(self, slots: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """(column, pages) of the evictable nodes, whose `slots` these are; columns increasing."""
        now = {id(each): each for each in slots}
        new = [each for key, each in now.items() if key not in self._counted]
        gone = [each for key, each in self._counted.items() if key not in now]
        self._read([each for each in new if each not in self._known])
        for each in gone:
            columns, counts = self._known[each]
            self._counts[columns] -= counts
        for each in new:
            columns, counts = self._known[each]
            self._counts[columns] += counts
        self._counted = now
        found = np.flatnonzero(self._counts)
        return list(zip(found.tolist(), self._counts[found].tolist(), strict=True))

    def _read(self, slots: Sequence[torch.Tensor]) -> None:
        if not slots:
            return
        ids = torch.cat([each.reshape(-1) for each in slots]).cpu().numpy()
        ends = np.cumsum([each.numel() for each in slots])
        for each, part in zip(slots, np.split(ids, ends[:-1]), strict=True):
            self._known[each] = self._count(part)

    def _count(self, ids: Iterable[int]) -> _Counts:
        pages = np.unique(np.asarray(ids, dtype=np.int64) // self._page_tokens)
        columns, counts = np.unique(pages // self._column_pages, return_counts=True)
        return columns, counts.astype(np.int64)
