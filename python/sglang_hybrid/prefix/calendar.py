"""An index for scores of the form `rate[class, age bin] * density`, where only the age changes by itself.

The entries put last stand in a table of `ROWS` rows, which is scored as a whole for every victim: exactly, at a dozen
array operations however many rows are in use. Beyond that the entry that stands there longest moves on to a `Slice`:
entries of one class and of nearly the same last use, a heap by density, which age together. Slices of one (class, age
bin) form a bucket, a heap by the lowest density of each slice; the best bucket is found in one pass over the heads. So
an entry moves singly only while it is young, and `put` and `pop` are O(log n) amortised.

Exactness: with up to `ROWS` entries the victim is the exact argmin of the batch scores, provided every density was put
again when it changed. Beyond that an entry in a slice may change its age bin early or late by a few per cent of its age
(`NEAR`), and later where more than `_MOVES` slices fell due since the last call.

Heaps and heads are lazy: what they hold is never higher than what is true, and is made true where it comes first.
"""

from bisect import bisect_right
from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.candidates import FloatArray, IntArray
from sglang_hybrid.prefix.reuse import BINS, EDGES_LIST, age_bin, flat

ROWS = 512
NEAR = tuple(0.04 * edge for edge in EDGES_LIST)  # seconds by age bin: last uses this near to each other age together
_SLICE = 64  # entries a slice may hold
_FEW = 16  # a slice of up to so many merges into a near one when both come into a new bucket
_MOVES = 32
_NONE = float("inf")


class _Entry:
    """An id with its score but for the rate, in `row` of the table or, with a `row` below zero, in `slice`."""

    __slots__ = ("density", "id", "last_s", "reuse_class", "row", "slice")

    def __init__(self, entry_id: int, reuse_class: int, last_s: float, density: float, row: int) -> None:
        self.id = entry_id
        self.reuse_class = reuse_class
        self.last_s = last_s
        self.density = density
        self.row = row
        self.slice: Slice | None = None


_Item = tuple[float, int, _Entry]  # density, a number that no other item has, entry: stale unless all of it still holds


class Slice:
    """Entries that age together as if last used at `ref_s`; `lowest` is at most the least density among them."""

    __slots__ = ("bucket", "items", "live", "lowest", "ref_s")

    def __init__(self, bucket: int, ref_s: float) -> None:
        self.bucket = bucket
        self.ref_s = ref_s
        self.items: list[_Item] = []
        self.live = 0
        self.lowest = _NONE

    def head(self) -> _Item:
        """The item of the lowest entry; there is one in a slice that is live."""
        items = self.items
        while True:
            density, _, entry = item = items[0]
            if entry.slice is self and entry.density == density:
                return item
            heappop(items)

    def present(self) -> list[_Item]:
        """The items that are not stale, each entry once."""
        found = {item[2].id: item for item in self.items if item[2].slice is self and item[2].density == item[0]}
        return list(found.values())


class AgingHeaps:
    """The index described above over opaque integer ids; `rates` is a live array of shape [classes, BINS]."""

    def __init__(self, rates: FloatArray) -> None:
        self._rates = rates.reshape(-1)  # by bucket = class * BINS + age bin
        if not np.shares_memory(self._rates, rates):
            raise InvariantError(f"rates are read as they change and must be contiguous: shape {rates.shape}")
        self._entries: dict[int, _Entry] = {}
        self._number = 0
        self.last_score = 0.0  # of the entry `pop` returned last
        # the table: score = rates[bucket] * density, unused rows have an infinite density
        self._rows: list[_Entry | None] = [None] * ROWS
        self._free = list(range(ROWS - 1, -1, -1))
        self._recent: OrderedDict[int, _Entry] = OrderedDict()  # those in the table, as they came
        self._buckets: IntArray = np.zeros(ROWS, dtype=np.int64)
        self._densities: FloatArray = np.full(ROWS, np.inf)
        self._due_s: FloatArray = np.full(ROWS, np.inf)  # when the age bin of a row changes
        self._next_s = _NONE  # at most the least of them
        self._row_scores: FloatArray = np.empty(ROWS)
        self._bucket = self._buckets.data.cast("B").cast("q")
        self._density, self._due = flat(self._densities), flat(self._due_s)
        # the slices
        self._heads: FloatArray = np.full(rates.size, np.inf)
        self._scores: FloatArray = np.empty(rates.size)
        self._head = flat(self._heads)
        self._tops: list[list[tuple[float, int, Slice]]] = [[] for _ in range(rates.size)]
        self._slices = [0] * rates.size  # that are live, by bucket
        self._open: list[Slice | None] = [None] * rates.size  # the slice of a bucket that takes near entries
        self._ageing: list[tuple[float, int, Slice]] = []  # by when they leave their bucket

    def put(self, entry_id: int, reuse_class: int, last_s: float, density: float, now: float) -> None:
        """Add an entry or replace its class, last use (seconds) and density (> 0)."""
        entry = self._entries.get(entry_id)
        if entry is not None and entry.reuse_class == reuse_class and entry.last_s == last_s:
            if entry.density != density:
                self._reprice(entry, density)
            return
        if entry is not None and entry.row >= 0:
            row = entry.row
            entry.reuse_class, entry.last_s, entry.density = reuse_class, last_s, density
            self._recent.move_to_end(entry_id)
        else:
            if entry is not None:
                self._leave(entry)
            row = self._free.pop() if self._free else self._make_room(now)
            entry = _Entry(entry_id, reuse_class, last_s, density, row)
            self._entries[entry_id] = self._recent[entry_id] = self._rows[row] = entry
        at_bin = age_bin(now - last_s) if now > last_s else 0
        due_s = last_s + EDGES_LIST[at_bin + 1]
        self._bucket[row] = reuse_class * BINS + at_bin
        self._density[row] = density
        self._due[row] = due_s
        if due_s < self._next_s:
            self._next_s = due_s

    def discard(self, entry_id: int) -> None:
        """Forget an entry; unknown ids are ignored."""
        entry = self._entries.pop(entry_id, None)
        if entry is None:
            return
        row = entry.row
        if row < 0:
            self._leave(entry)
            return
        del self._recent[entry_id]
        self._density[row] = self._due[row] = _NONE
        self._rows[row] = None
        self._free.append(row)

    def pop(self, now: float) -> int | None:
        """Remove and return the id with the lowest score, None when empty."""
        if not self._entries:
            return None
        self.advance(now)
        lowest, found = _NONE, None
        if self._recent:
            scores = self._rates.take(self._buckets, out=self._row_scores, mode="clip")  # does not buffer, as "raise"
            scores *= self._densities
            row = int(scores.argmin())
            lowest, found = scores.item(row), self._rows[row]
        if len(self._entries) > len(self._recent):
            entry = self._lowest_in_slices(lowest)
            found = found if entry is None else entry
        else:
            self.last_score = lowest
        if found is None:
            raise InvariantError(f"no entry has the lowest score: {len(self._entries)}")
        self.discard(found.id)
        return found.id

    def _lowest_in_slices(self, below: float) -> _Entry | None:
        """The entry of the lowest score below `below`, None without one; sets `last_score`."""
        scores = np.multiply(self._heads, self._rates, out=self._scores)
        while True:
            bucket = int(scores.argmin())
            score = scores.item(bucket)
            if score >= below:
                self.last_score = below
                return None
            shown = self._head[bucket]
            top = self._top(bucket)
            self._head[bucket] = _NONE if top is None else top.lowest
            scores[bucket] = self._head[bucket] * self._rates.item(bucket)
            if top is not None and top.lowest == shown:
                self.last_score = score
                return top.head()[2]

    def advance(self, now: float) -> None:
        """Move what left its age bin: all rows of the table, at most `_MOVES` slices, oldest first."""
        if now >= self._next_s:
            rows, bucket, due = self._rows, self._bucket, self._due
            for row in (self._due_s <= now).nonzero()[0].tolist():
                entry = rows[row]
                if entry is not None:
                    last_s = entry.last_s
                    at_bin = bisect_right(EDGES_LIST, now - last_s) - 1
                    bucket[row] = entry.reuse_class * BINS + at_bin
                    due[row] = last_s + EDGES_LIST[at_bin + 1]
            self._next_s = self._due_s.item(self._due_s.argmin())
        if self._ageing and self._ageing[0][0] <= now:
            self._age_slices(now)

    def _age_slices(self, now: float) -> None:
        ageing, moves = self._ageing, _MOVES
        while moves and ageing and ageing[0][0] <= now:
            moved = heappop(ageing)[2]
            if moved.live:
                moves -= 1
                self._move(moved, now)

    def _make_room(self, now: float) -> int:
        """Move the entry that is longest in the table to a slice; returns its row."""
        if self._ageing and self._ageing[0][0] <= now:
            self._age_slices(now)
        _, entry = self._recent.popitem(last=False)
        row, entry.row = entry.row, -1
        bucket = entry.reuse_class * BINS + age_bin(now - entry.last_s)
        near = self._near(bucket, entry.last_s, 1)
        if near is None:
            near = Slice(bucket, entry.last_s)
            self._schedule(near)
        self._take(near, entry)
        return row

    def _near(self, bucket: int, ref_s: float, entries: int) -> Slice | None:
        """The open slice of `bucket` if it has room for `entries` last used about `ref_s`."""
        near = self._open[bucket]
        if near is None or near.bucket != bucket or len(near.items) + entries > _SLICE:
            return None
        return near if abs(near.ref_s - ref_s) <= NEAR[bucket % BINS] else None

    def _take(self, taker: Slice, entry: _Entry) -> None:
        entry.slice = taker
        self._number += 1
        heappush(taker.items, (entry.density, self._number, entry))
        if not taker.live:
            self._slices[taker.bucket] += 1
        taker.live += 1
        if entry.density < taker.lowest:
            taker.lowest = entry.density
            self._show(taker)

    def _reprice(self, entry: _Entry, density: float) -> None:
        entry.density = density
        held = entry.slice
        if held is None:
            self._density[entry.row] = density
            return
        self._number += 1
        heappush(held.items, (density, self._number, entry))
        if len(held.items) > 2 * _SLICE:
            held.items = held.present()
            heapify(held.items)
        if density < held.lowest:
            held.lowest = density
            self._show(held)

    def _leave(self, entry: _Entry) -> None:
        """The entry is in no slice any more; its items are stale."""
        held, entry.slice = entry.slice, None
        if held is not None:
            held.live -= 1
            if not held.live:
                self._close(held)

    def _close(self, empty: Slice) -> None:
        self._slices[empty.bucket] -= 1
        empty.bucket = -1
        empty.items = []  # now: many at once, when the heaps that hold the slice are cleaned, take as long as a request

    def _move(self, moved: Slice, now: float) -> None:
        """Take a live slice to the bucket of its age, or what is in it to an open slice there."""
        old = moved.bucket
        at_bin = max(age_bin(now - moved.ref_s), old % BINS + 1)
        bucket = old - old % BINS + at_bin
        near = self._near(bucket, moved.ref_s, moved.live) if moved.live <= _FEW else None
        if near is None:
            self._slices[old] -= 1
            self._slices[bucket] += 1
            moved.bucket = bucket
            moved.lowest = moved.head()[0]
            self._show(moved)
            self._schedule(moved)
            return
        for _, _, entry in moved.present():
            self._take(near, entry)
        moved.live = 0
        self._close(moved)

    def _schedule(self, waiting: Slice) -> None:
        bucket = waiting.bucket
        self._open[bucket] = waiting
        at_bin = bucket % BINS
        if at_bin < BINS - 1:
            self._number += 1
            heappush(self._ageing, (waiting.ref_s + EDGES_LIST[at_bin + 1], self._number, waiting))
            if len(self._ageing) > 4 * len(self._entries) + 256:
                self._ageing = [item for item in self._ageing if item[2].live]
                heapify(self._ageing)

    def _show(self, shown: Slice) -> None:
        """Enter `lowest` of a slice in its bucket."""
        bucket, lowest = shown.bucket, shown.lowest
        tops = self._tops[bucket]
        self._number += 1
        heappush(tops, (lowest, self._number, shown))
        if lowest < self._head[bucket]:
            self._head[bucket] = lowest
        if len(tops) > 2 * self._slices[bucket] + 64:
            each = {id(top[2]): top for top in tops if top[2].bucket == bucket and top[0] == top[2].lowest}
            tops[:] = each.values()
            heapify(tops)

    def _top(self, bucket: int) -> Slice | None:
        """The slice of `bucket` with the lowest entry, its `lowest` made true; None if there is none."""
        tops = self._tops[bucket]
        while tops:
            lowest, _, top = tops[0]
            if top.bucket != bucket or top.lowest != lowest:
                heappop(tops)
                continue
            top.lowest = top.head()[0]
            if top.lowest == lowest:
                return top
            self._number += 1
            heapreplace(tops, (top.lowest, self._number, top))
        return None

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Raise InvariantError where an entry is not in its place, or a head is higher than what it stands for."""
        slices: dict[int, Slice] = {}
        for entry_id, entry in self._entries.items():
            row, held = entry.row, entry.slice
            if row >= 0:
                stands = self._rows[row] is entry and self._density[row] == entry.density and entry_id in self._recent
                stands = stands and self._bucket[row] // BINS == entry.reuse_class and self._due[row] >= self._next_s
            else:
                stands = held is not None and any(e is entry and d == entry.density for d, _, e in held.items)
                if held is not None:
                    slices[id(held)] = held
            if not stands:
                raise InvariantError(f"an entry is not in its place: {entry_id}")
        rows, live = len(self._recent), sum(held.live for held in slices.values())
        if rows + live != len(self._entries) or rows + len(self._free) != ROWS:
            raise InvariantError(f"rows {rows} and entries in slices {live} are all there is: {len(self._entries)}")
        ageing = {id(item[2]) for item in self._ageing}
        for held in slices.values():
            bucket, lowest = held.bucket, min(item[0] for item in held.present())
            shown = any(d == held.lowest and s is held for d, _, s in self._tops[bucket])
            if not (shown and lowest >= held.lowest >= self._head[bucket]):
                raise InvariantError(f"the head of a bucket is stale: {divmod(bucket, BINS)}")
            if bucket % BINS < BINS - 1 and id(held) not in ageing:
                raise InvariantError(f"a slice does not age: {divmod(bucket, BINS)}")
        if sum(self._slices) != len(slices):
            raise InvariantError(f"live slices, counted {len(slices)}: {sum(self._slices)}")
