"""An index for scores of the form `rate[class, age bin] * density`, where only the age changes by itself.

Entries live in one heap per (class, age bin), ordered by density; within a bucket the order does not change with time,
so the victim is the head with the lowest `rate * density` over all buckets. A second heap per age bin, by last use,
moves entries on as they age: each moves at most BINS times between two uses. `put` and `pop` are O(log n) amortised.

Exactness: the victim is the exact argmin of the batch scores, provided every density was put again when it changed and
no more than `_MOVES` entries fell due since the last call (the rest stay in their younger bin until the next calls).
"""

import heapq

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.candidates import FloatArray
from sglang_hybrid.prefix.reuse import BINS, EDGES_LIST, age_bin

_MOVES = 64


class _Entry:
    __slots__ = ("age_bin", "density", "last_s", "reuse_class", "version")

    def __init__(self, reuse_class: int, at_bin: int, last_s: float, density: float, version: int) -> None:
        self.reuse_class = reuse_class
        self.age_bin = at_bin
        self.last_s = last_s
        self.density = density
        self.version = version


class AgingHeaps:
    """The buckets described above over opaque integer ids; `rates` is a live array of shape [classes, BINS]."""

    def __init__(self, rates: FloatArray) -> None:
        self._rates = rates
        self._heads: FloatArray = np.full(rates.shape, np.inf)
        self._heaps: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
        self._due: list[list[tuple[float, int, int]]] = [[] for _ in range(BINS - 1)]  # heaps by last use
        self._entries: dict[int, _Entry] = {}
        self._stored = 0  # tuples in both kinds of heaps, stale ones included
        self._version = 0
        self.last_score = 0.0  # of the entry `pop` returned last
        self._advanced_s = -1.0  # everything due until then has moved

    def put(self, entry_id: int, reuse_class: int, last_s: float, density: float, now: float) -> None:
        """Add an entry or replace its class, last use (seconds) and density (> 0)."""
        entry = self._entries.get(entry_id)
        if entry is not None and entry.reuse_class == reuse_class and entry.last_s == last_s:
            if entry.density != density:
                was_head = self._heaps[reuse_class, entry.age_bin][0][1] == entry_id
                entry.density = density
                if was_head:
                    self._show_head(reuse_class, entry.age_bin)
                self._push(entry_id, entry)
            return
        self.advance(now)
        if entry is not None:
            self.discard(entry_id)
        self._version += 1
        entry = _Entry(reuse_class, age_bin(now - last_s), last_s, density, self._version)
        self._entries[entry_id] = entry
        self._schedule(entry_id, entry)
        self._push(entry_id, entry)  # last: it may rebuild, which schedules every entry again

    def discard(self, entry_id: int) -> None:
        """Forget an entry; unknown ids are ignored."""
        entry = self._entries.pop(entry_id, None)
        if entry is not None and self._heaps[entry.reuse_class, entry.age_bin][0][1] == entry_id:
            self._show_head(entry.reuse_class, entry.age_bin)

    def pop(self, now: float) -> int | None:
        """Remove and return the id with the lowest score, None when empty."""
        self.advance(now)
        if not self._entries:
            return None
        scores = self._heads * self._rates
        reuse_class, at_bin = divmod(int(scores.argmin()), BINS)
        self.last_score = float(scores[reuse_class, at_bin])
        entry_id = self._heaps[reuse_class, at_bin][0][1]
        self.discard(entry_id)
        return entry_id

    def advance(self, now: float) -> None:
        """Move entries whose age left their bin, at most `_MOVES` of them, oldest first."""
        if now <= self._advanced_s:
            return
        moves, entries, heaps = _MOVES, self._entries, self._heaps
        for at_bin in range(BINS - 2, -1, -1):
            queue, limit = self._due[at_bin], now - EDGES_LIST[at_bin + 1]
            while queue and queue[0][0] <= limit and moves:
                last_s, entry_id, version = heapq.heappop(queue)
                self._stored -= 1
                entry = entries.get(entry_id)
                if entry is None or entry.version != version:
                    continue
                moves -= 1
                reuse_class = entry.reuse_class
                entry.age_bin = at_bin + 1 if now - last_s < EDGES_LIST[at_bin + 2] else age_bin(now - last_s)
                if heaps[reuse_class, at_bin][0][1] == entry_id:
                    self._show_head(reuse_class, at_bin)
                self._enter(entry_id, entry)
                self._schedule(entry_id, entry)
        if moves:
            self._advanced_s = now

    def _enter(self, entry_id: int, entry: _Entry) -> None:
        bucket = (entry.reuse_class, entry.age_bin)
        heap = self._heaps.get(bucket)
        if heap is None:
            heap = self._heaps[bucket] = []
        heapq.heappush(heap, (entry.density, entry_id, entry.version))
        self._stored += 1
        if heap[0][1] == entry_id:
            self._show_head(*bucket)

    def _push(self, entry_id: int, entry: _Entry) -> None:
        self._enter(entry_id, entry)
        if self._stored > 6 * len(self._entries) + 1024:
            self._rebuild()

    def _schedule(self, entry_id: int, entry: _Entry) -> None:
        if entry.age_bin < BINS - 1:
            heapq.heappush(self._due[entry.age_bin], (entry.last_s, entry_id, entry.version))
            self._stored += 1

    def _show_head(self, reuse_class: int, at_bin: int) -> None:
        heap = self._heaps.get((reuse_class, at_bin))
        while heap:
            density, entry_id, version = heap[0]
            entry = self._entries.get(entry_id)
            if entry is not None and entry.version == version and entry.density == density and entry.age_bin == at_bin:
                self._heads[reuse_class, at_bin] = density
                return
            heapq.heappop(heap)
            self._stored -= 1
        self._heads[reuse_class, at_bin] = np.inf

    def _rebuild(self) -> None:
        self._heaps.clear()
        self._heads.fill(np.inf)
        self._due = [[] for _ in range(BINS - 1)]
        for entry_id, entry in sorted(self._entries.items(), key=lambda item: item[1].last_s):
            heap = self._heaps.setdefault((entry.reuse_class, entry.age_bin), [])
            heap.append((entry.density, entry_id, entry.version))
            if entry.age_bin < BINS - 1:
                self._due[entry.age_bin].append((entry.last_s, entry_id, entry.version))
        for (reuse_class, at_bin), heap in self._heaps.items():
            heapq.heapify(heap)
            self._heads[reuse_class, at_bin] = heap[0][0]
        self._stored = sum(len(heap) for heap in self._heaps.values()) + sum(len(queue) for queue in self._due)

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Raise InvariantError if an entry is in no heap or a head is not the lowest density of its bucket."""
        lowest: FloatArray = np.full(self._heads.shape, np.inf)
        for entry_id, entry in self._entries.items():
            bucket = (entry.reuse_class, entry.age_bin)
            if (entry.density, entry_id, entry.version) not in self._heaps.get(bucket, []):
                raise InvariantError(f"an entry is missing from its bucket {bucket}: {entry_id}")
            lowest[bucket] = min(lowest[bucket], entry.density)
        if not np.array_equal(lowest, self._heads):
            raise InvariantError(f"heads of the buckets are stale: {np.argwhere(lowest != self._heads).tolist()}")
