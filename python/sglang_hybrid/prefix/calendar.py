"""An index for scores of the form `rate[class, age bin] * density`, where only the age changes by itself.

Entries live in one heap per (class, age bin), ordered by density; within a bucket the order does not change with time,
so the victim is the head with the lowest `rate * density` over all buckets. A queue per age bin, by last use, moves
entries on as they age: each moves at most BINS times between two uses. `put` and `pop` are O(log n) amortised.

What left a heap stays in it until it comes to its head, or until more than half of the heap is such: then the heap is
retired and swept from its end, `_SWEPT` tuples per later change of its bucket, so no call pays for all of it. (A list
without its last items is still a heap, so both halves of the bucket have a head all the while.)

Exactness: the victim is the exact argmin of the batch scores, provided every density was put again when it changed and
no more than `_MOVES` entries fell due since the last call (the rest stay in their younger bin until the next calls).
"""

from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.candidates import FloatArray
from sglang_hybrid.prefix.reuse import BINS, EDGES_LIST, age_bin, flat

_MOVES = 64
_SWEPT = 4
_NONE = float("inf")
_Item = tuple[float, int, int]  # density (or last use), entry id, version


class _Entry:
    __slots__ = ("bucket", "item", "last_s", "reuse_class", "version")

    def __init__(self, reuse_class: int, at_bin: int, last_s: float, item: _Item) -> None:
        self.reuse_class = reuse_class
        self.bucket = reuse_class * BINS + at_bin
        self.last_s = last_s
        self.item = item  # the tuple that stands for the entry; any other one in a heap is stale
        self.version = item[2]


class AgingHeaps:
    """The buckets described above over opaque integer ids; `rates` is a live array of shape [classes, BINS]."""

    def __init__(self, rates: FloatArray) -> None:
        self._rates = rates
        self._heads: FloatArray = np.full(rates.shape, np.inf)
        self._scores: FloatArray = np.empty(rates.shape)
        self._head = flat(self._heads)  # the same floats, by bucket
        self._heaps: list[list[_Item]] = [[] for _ in range(rates.size)]
        self._retired: dict[int, list[_Item]] = {}
        self._live = [0] * rates.size  # entries per bucket
        self._entries: dict[int, _Entry] = {}
        self._due: list[deque[_Item]] = [deque() for _ in range(BINS - 1)]  # by last use, as they came in order
        self._late: list[list[_Item]] = [[] for _ in range(BINS - 1)]  # heaps of those that came out of order
        self._stored = 0  # tuples in all of them, stale ones included
        self._version = 0
        self.last_score = 0.0  # of the entry `pop` returned last
        self._advanced_s = -1.0  # everything due until then has moved

    def put(self, entry_id: int, reuse_class: int, last_s: float, density: float, now: float) -> None:
        """Add an entry or replace its class, last use (seconds) and density (> 0)."""
        entry = self._entries.get(entry_id)
        if entry is not None and entry.reuse_class == reuse_class and entry.last_s == last_s:
            if entry.item[0] != density:
                gone = entry.item
                entry.item = (density, entry_id, entry.version)
                self._leave(entry.bucket, gone)
                self._enter(entry)
                self._bound()
            return
        self.advance(now)
        if entry is not None:
            self.discard(entry_id)
        self._version += 1
        item = (density, entry_id, self._version)
        entry = _Entry(reuse_class, age_bin(now - last_s), last_s, item)
        self._entries[entry_id] = entry
        self._schedule(entry.bucket % BINS, (last_s, entry_id, self._version))
        self._enter(entry)
        self._bound()  # last: it may rebuild, which schedules every entry again

    def discard(self, entry_id: int) -> None:
        """Forget an entry; unknown ids are ignored."""
        entry = self._entries.pop(entry_id, None)
        if entry is not None:
            self._leave(entry.bucket, entry.item)

    def pop(self, now: float) -> int | None:
        """Remove and return the id with the lowest score, None when empty."""
        self.advance(now)
        if not self._entries:
            return None
        scores = np.multiply(self._heads, self._rates, out=self._scores)
        bucket = int(scores.argmin())
        self.last_score = float(scores.item(bucket))
        head = self._lowest(bucket)
        if head is None:
            raise InvariantError(f"a bucket without an entry shows a head: {divmod(bucket, BINS)}")
        self.discard(head[1])
        return head[1]

    def advance(self, now: float) -> None:
        """Move entries whose age left their bin, at most `_MOVES` of them, oldest first."""
        if now <= self._advanced_s:
            return
        moves, entries = _MOVES, self._entries
        for at_bin in range(BINS - 2, -1, -1):
            queue, late, limit = self._due[at_bin], self._late[at_bin], now - EDGES_LIST[at_bin + 1]
            while moves:
                if late and late[0][0] <= limit and (not queue or late[0] < queue[0]):
                    item = heappop(late)
                elif queue and queue[0][0] <= limit:
                    item = queue.popleft()
                else:
                    break
                self._stored -= 1
                entry = entries.get(item[1])
                if entry is None or entry.version != item[2]:
                    continue
                moves -= 1
                age_s = now - item[0]
                to_bin = at_bin + 1 if age_s < EDGES_LIST[at_bin + 2] else age_bin(age_s)
                bucket = entry.bucket
                entry.bucket = bucket + to_bin - at_bin
                self._leave(bucket, entry.item)
                self._enter(entry)
                self._schedule(to_bin, item)
        if moves:
            self._advanced_s = now

    def _enter(self, entry: _Entry) -> None:
        bucket, item = entry.bucket, entry.item
        heap = self._heaps[bucket]
        heappush(heap, item)
        self._stored += 1
        self._live[bucket] += 1
        if item[0] < self._head[bucket]:
            self._head[bucket] = item[0]
        if bucket in self._retired:
            self._sweep(bucket)
        elif len(heap) > 2 * self._live[bucket] + 64:
            self._retired[bucket] = heap
            self._heaps[bucket] = []

    def _leave(self, bucket: int, item: _Item) -> None:
        """An entry is no longer in `bucket`, where `item` stood for it: stale already, so no head of a heap."""
        self._live[bucket] -= 1
        heap, retired = self._heaps[bucket], self._retired.get(bucket)
        if (heap and heap[0] is item) or (retired and retired[0] is item):
            lowest = self._lowest(bucket)
            self._head[bucket] = _NONE if lowest is None else lowest[0]
        if retired:
            self._sweep(bucket)

    def _schedule(self, at_bin: int, item: _Item) -> None:
        if at_bin < BINS - 1:
            queue = self._due[at_bin]
            if not queue or queue[-1] <= item:
                queue.append(item)
            else:
                heappush(self._late[at_bin], item)
            self._stored += 1

    def _lowest(self, bucket: int) -> _Item | None:
        """The tuple of the lowest entry of `bucket`."""
        self._clean(self._heaps[bucket], bucket)
        retired = self._retired.get(bucket)
        if retired is None:
            return self._heaps[bucket][0] if self._heaps[bucket] else None
        self._clean(retired, bucket)
        if not retired:
            del self._retired[bucket]
        return min((heap[0] for heap in (self._heaps[bucket], retired) if heap), default=None)

    def _clean(self, heap: list[_Item], bucket: int) -> None:
        """Pop stale tuples until the head of `heap` stands for an entry of `bucket`."""
        if not self._live[bucket]:  # nothing stands for anything: no need to look one by one
            self._stored -= len(heap)
            heap.clear()
        entries = self._entries
        while heap:
            item = heap[0]
            entry = entries.get(item[1])
            if entry is not None and entry.item is item and entry.bucket == bucket:
                return
            heappop(heap)
            self._stored -= 1

    def _sweep(self, bucket: int) -> None:
        retired = self._retired.get(bucket, [])
        for _ in range(min(_SWEPT, len(retired))):
            item = retired.pop()
            entry = self._entries.get(item[1])
            if entry is not None and entry.item is item and entry.bucket == bucket:
                heappush(self._heaps[bucket], item)
            else:
                self._stored -= 1
        if not retired:
            self._retired.pop(bucket, None)

    def _bound(self) -> None:
        """Rebuild everything where queues hold too many tuples of entries that left before they aged."""
        if self._stored > 6 * len(self._entries) + 1024:
            self._rebuild()

    def _rebuild(self) -> None:
        self._retired.clear()
        self._heads.fill(np.inf)
        for held in (*self._heaps, *self._due, *self._late):
            held.clear()
        self._stored = 0
        for entry_id, entry in sorted(self._entries.items(), key=lambda each: (each[1].last_s, each[0])):
            self._heaps[entry.bucket].append(entry.item)
            self._stored += 1
            self._schedule(entry.bucket % BINS, (entry.last_s, entry_id, entry.version))
        for bucket, heap in enumerate(self._heaps):
            if heap:
                heapify(heap)
                self._head[bucket] = heap[0][0]

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Raise InvariantError if an entry is in no heap or a head is not the lowest density of its bucket."""
        lowest: FloatArray = np.full(self._heads.shape, np.inf)
        live = [0] * len(self._live)
        for entry_id, entry in self._entries.items():
            at = divmod(entry.bucket, BINS)
            if entry.item not in self._heaps[entry.bucket] + self._retired.get(entry.bucket, []):
                raise InvariantError(f"an entry is missing from its bucket {at}: {entry_id}")
            lowest[at] = min(lowest[at], entry.item[0])
            live[entry.bucket] += 1
        if live != self._live:
            raise InvariantError(f"entries per bucket are miscounted: {sum(self._live)}")
        if not np.array_equal(lowest, self._heads):
            raise InvariantError(f"heads of the buckets are stale: {np.argwhere(lowest != self._heads).tolist()}")
