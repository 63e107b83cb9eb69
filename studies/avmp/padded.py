"""padded_unified: one pool whose page is the larger of a KV page and a state block (AVMP 4.1, vLLM issue 37121).

The released allocator hands out raw page ids. A request that was evicted still holds the ids it had, and frees them
when it departs, although they may belong to somebody else by then; that use-after-free is part of the published
numbers, so it is part of this baseline.
"""

import numpy as np
from numpy.typing import NDArray

from avmp.geometry import KV, SLAB_ALIGNMENT_BYTES, STATE, Geometry, align_up
from avmp.published import PerLayer
from avmp.recency import Recency
from avmp.store import TailStore
from avmp.workloads import Request

_NOBODY = -1


class PaddedUnified(PerLayer):
    """One store of padded pages, first come first served, least recent request evicted."""

    def __init__(self, geometry: Geometry, total_bytes: int) -> None:
        super().__init__(geometry)
        self._total_bytes = total_bytes
        self.page_bytes = align_up(max(geometry.unit_bytes(KV), geometry.unit_bytes(STATE)), SLAB_ALIGNMENT_BYTES)
        self.store = TailStore(total_bytes // self.page_bytes, total_bytes // self.page_bytes)
        self.recency = Recency()
        self._owner = np.full(self.store.limit, _NOBODY, dtype=np.int64)
        self._given_at = np.zeros(self.store.limit, dtype=np.int64)  # which allocation gave the page out last
        self._given: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        self._pages_of: dict[int, int] = {}
        self._held: dict[int, list[NDArray[np.int64]]] = {}

    @property
    def reserved_bytes(self) -> int:
        """See Allocator."""
        return self._total_bytes

    def allocate(self, kind: int, request_id: int, count: int) -> bool:
        """Take, else evict one request and take; False if that fails too."""
        if count > self.store.free_pages:
            self._evict()
            if count > self.store.free_pages:
                return False
        pages = self.store.take(count)
        assert pages is not None
        self._given_at[pages] = len(self._given)
        self._owner[pages] = request_id
        self.recency.touch(request_id, np.array([len(self._given)], dtype=np.uint32))
        self._given.append(pages)
        self._pages_of[request_id] = self._pages_of.get(request_id, 0) + count
        self._held.setdefault(request_id, []).append(pages)
        return True

    def depart(self, request: Request) -> None:
        """See Allocator; frees ids that may meanwhile be another request's."""
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        pages = np.concatenate(held)
        pages = pages[np.sort(np.unique(pages, return_index=True)[1])]
        pages = pages[self._owner[pages] != _NOBODY]
        if not len(pages):
            return
        self.counters["visited"] += int((self._owner != _NOBODY).sum())
        owners, counts = np.unique(self._owner[pages], return_counts=True)
        for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
            if owner != request.request_id:
                self.killed.add(owner)
            self._pages_of[owner] -= count
            if not self._pages_of[owner]:
                self.recency.drop(owner)
        self._free(pages)

    def _evict(self) -> None:
        victim = self.recency.oldest()
        if victim is None:
            return
        request_id, given = victim
        pages = [self._given[index][self._given_at[self._given[index]] == index] for index in given.tolist()]
        self.killed.add(request_id)
        self.counters["evictions"] += 1
        self._pages_of[request_id] = 0
        self._free(np.concatenate(pages))

    def _free(self, pages: NDArray[np.int64]) -> None:
        self._owner[pages] = _NOBODY
        self._given_at[pages] = 0
        self.store.give(pages)
