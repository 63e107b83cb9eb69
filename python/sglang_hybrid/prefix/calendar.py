"""An index for scores of the form `rate[class, age bin] * density`, where only the age changes by itself.

The entries put last stand in a table of `ROWS` rows, which is scored as a whole for every victim: exactly, at a dozen
array operations however many rows are in use. Beyond that the entry that stands there longest moves on to a `Slice`:
up to `_SLICE` entries of one class and of nearly the same last use, which age together. Slices of one (class, age bin)
form a bucket, a heap by the lowest density of each slice; the best bucket is found in one pass over the heads. So an
entry moves singly only while it is young, and `put` and `pop` are O(log n) amortised.

Exactness: with up to `ROWS` entries the victim is the exact argmin of the batch scores, provided every density was put
again when it changed. Beyond that an entry in a slice may change its age bin early or late by a few per cent of its age
(`NEAR`), and later where more than `_MOVES` slices fell due since the last call.

Heads, and the lowest density by which a slice stands in its bucket, are lazy: never higher than what is true, and made
true where they come first. A call allocates next to nothing: a hundred requests later the garbage collector walks over
what was, through cold memory, and that took longer than any decision.
"""

from bisect import bisect_right
from collections import OrderedDict
from math import nextafter

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.candidates import FloatArray, IntArray
from sglang_hybrid.prefix.heap import Heap, Place
from sglang_hybrid.prefix.reuse import BINS, EDGES_LIST, age_bin, flat

ROWS = 512
NEAR = tuple(0.04 * edge for edge in EDGES_LIST)  # seconds by age bin: last uses this near to each other age together
_SLICE = 64  # entries a slice may take, those that left it again included
_FEW = 16  # a slice of up to so many merges into a near one when both come into a new bucket
_MOVES = 8
_NONE = float("inf")


class _Entry:
    """An id with its score but for the rate, in `row` of the table or, with a `row` below zero, `at` in `slice`."""

    __slots__ = ("at", "density", "id", "last_s", "reuse_class", "row", "slice")

    def __init__(self, entry_id: int, reuse_class: int, last_s: float, density: float, row: int) -> None:
        self.id = entry_id
        self.reuse_class = reuse_class
        self.last_s = last_s
        self.density = density
        self.row = row
        self.slice: Slice | None = None
        self.at = 0


class Slice:
    """Entries that age together as if last used at `ref_s`, and their densities, infinite where one has left.

    `shown` is its place in its bucket, by at most the least density, `due` that among all slices, by when it leaves
    the bucket (in seconds).
    """

    __slots__ = ("bucket", "densities", "due", "entries", "live", "ref_s", "shown")

    def __init__(self, bucket: int, ref_s: float) -> None:
        self.bucket = bucket
        self.ref_s = ref_s
        self.entries: list[_Entry] = []
        self.densities: list[float] = []
        self.live = 0
        self.shown: Place[Slice] = Place(self)
        self.due: Place[Slice] = Place(self)


class AgingHeaps:
    """The index described above over opaque integer ids; `rates` is a live array of shape [classes, BINS]."""

    def __init__(self, rates: FloatArray) -> None:
        self._rates = rates.reshape(-1)  # by bucket = class * BINS + age bin
        if not np.shares_memory(self._rates, rates):
            raise InvariantError(f"rates are read as they change and must be contiguous: shape {rates.shape}")
        self._entries: dict[int, _Entry] = {}
        self.last_score = 0.0  # of the entry `pop` returned last
        # the table: score = rates[bucket] * density, unused rows have an infinite density
        self._rows: list[_Entry | None] = [None] * ROWS
        self._free = list(range(ROWS - 1, -1, -1))
        self._recent: OrderedDict[int, _Entry] = OrderedDict()  # those in the table, as they came
        self._buckets: IntArray = np.zeros(ROWS, dtype=np.int64)
        self._densities: FloatArray = np.full(ROWS, np.inf)
        self._due: Heap[int] = Heap()  # rows by when their age bin changes
        self._due_places = [Place(row) for row in range(ROWS)]
        self._row_scores: FloatArray = np.empty(ROWS)
        self._bucket = self._buckets.data.cast("B").cast("q")
        self._density = flat(self._densities)
        # the slices
        self._heads: FloatArray = np.full(rates.size, np.inf)
        self._scores: FloatArray = np.empty(rates.size)
        self._head = flat(self._heads)
        self._tops: list[Heap[Slice]] = [Heap() for _ in range(rates.size)]
        self._open: list[Slice | None] = [None] * rates.size  # the slice of a bucket that takes near entries
        self._ageing: Heap[Slice] = Heap()

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
        self._bucket[row] = reuse_class * BINS + at_bin
        self._density[row] = density
        self._due.put(self._due_places[row], last_s + EDGES_LIST[at_bin + 1])

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
        self._density[row] = _NONE
        self._due.remove(self._due_places[row])
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
            top = self._top(bucket)
            lowest = _NONE if top is None else top.shown.key
            if top is not None and lowest == self._head[bucket]:
                self.last_score = score
                return top.entries[top.densities.index(lowest)]
            self._head[bucket] = lowest
            scores[bucket] = lowest * self._rates.item(bucket)

    def advance(self, now: float) -> None:
        """Move what left its age bin: all rows of the table, at most `_MOVES` slices, oldest first."""
        due, rows = self._due, self._rows
        first = due.first()
        while first is not None and first.key <= now:
            entry = rows[first.item]
            if entry is None:
                raise InvariantError(f"a row without an entry changes its age bin: {first.item}")
            at_bin = bisect_right(EDGES_LIST, now - entry.last_s) - 1
            self._bucket[first.item] = entry.reuse_class * BINS + at_bin
            due_s = entry.last_s + EDGES_LIST[at_bin + 1]
            due.put(first, due_s if due_s > now else nextafter(now, _NONE))  # the sum may round to `now`
            first = due.first()
        self._age_slices(now)

    def _age_slices(self, now: float) -> None:
        moves = _MOVES
        while moves:
            first = self._ageing.first()
            if first is None or first.key > now:
                break
            moves -= 1
            self._move(first.item, now)

    def _make_room(self, now: float) -> int:
        """Move the entry that is longest in the table to a slice; returns its row."""
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
        if near is None or near.bucket != bucket or len(near.entries) + entries > _SLICE:
            return None
        return near if abs(near.ref_s - ref_s) <= NEAR[bucket % BINS] else None

    def _take(self, taker: Slice, entry: _Entry) -> None:
        density = entry.density
        entry.slice, entry.at = taker, len(taker.entries)
        taker.entries.append(entry)
        taker.densities.append(density)
        taker.live += 1
        if taker.live == 1 or density < taker.shown.key:
            self._show(taker, density)

    def _reprice(self, entry: _Entry, density: float) -> None:
        entry.density = density
        held = entry.slice
        if held is None:
            self._density[entry.row] = density
            return
        held.densities[entry.at] = density
        if density < held.shown.key:
            self._show(held, density)

    def _leave(self, entry: _Entry) -> None:
        """The entry is in no slice any more; one that is empty then is gone."""
        held, entry.slice = entry.slice, None
        if held is None:
            return
        held.live -= 1
        if held.live:
            held.densities[entry.at] = _NONE
        else:
            self._close(held)

    def _close(self, empty: Slice) -> None:
        self._tops[empty.bucket].remove(empty.shown)
        self._ageing.remove(empty.due)
        empty.bucket = -1
        empty.entries, empty.densities = [], []

    def _move(self, moved: Slice, now: float) -> None:
        """Take a live slice to the bucket of its age, or what is in it to an open slice there."""
        old = moved.bucket
        at_bin = max(age_bin(now - moved.ref_s), old % BINS + 1)
        bucket = old - old % BINS + at_bin
        near = self._near(bucket, moved.ref_s, moved.live) if moved.live <= _FEW else None
        if near is None:
            self._tops[old].remove(moved.shown)
            moved.bucket = bucket
            self._show(moved, moved.shown.key)
            self._schedule(moved)
            return
        for entry in moved.entries:
            if entry.slice is moved:
                self._take(near, entry)
        moved.live = 0
        self._close(moved)

    def _schedule(self, waiting: Slice) -> None:
        bucket = waiting.bucket
        self._open[bucket] = waiting
        at_bin = bucket % BINS
        if at_bin < BINS - 1:
            self._ageing.put(waiting.due, waiting.ref_s + EDGES_LIST[at_bin + 1])
        else:
            self._ageing.remove(waiting.due)

    def _show(self, shown: Slice, lowest: float) -> None:
        """Let a slice stand in its bucket by `lowest`."""
        bucket = shown.bucket
        self._tops[bucket].put(shown.shown, lowest)
        if lowest < self._head[bucket]:
            self._head[bucket] = lowest

    def _top(self, bucket: int) -> Slice | None:
        """The slice of `bucket` with the lowest entry, its place made true; None if there is none."""
        tops = self._tops[bucket]
        while True:
            place = tops.first()
            if place is None:
                return None
            lowest = min(place.item.densities)
            if lowest == place.key:
                return place.item
            tops.put(place, lowest)

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Raise InvariantError where an entry is not in its place, or a head is higher than what it stands for."""
        slices: dict[int, Slice] = {}
        for entry_id, entry in self._entries.items():
            row, held = entry.row, entry.slice
            if row >= 0:
                stands = self._rows[row] is entry and self._density[row] == entry.density and entry_id in self._recent
                stands = stands and self._bucket[row] // BINS == entry.reuse_class
            else:
                stands = held is not None and held.entries[entry.at] is entry
                stands = stands and held is not None and held.densities[entry.at] == entry.density
                if held is not None:
                    slices[id(held)] = held
            if not stands:
                raise InvariantError(f"an entry is not in its place: {entry_id}")
        rows, live = len(self._recent), sum(held.live for held in slices.values())
        if rows + live != len(self._entries) or rows + len(self._free) != ROWS:
            raise InvariantError(f"rows {rows} and entries in slices {live} are all there is: {len(self._entries)}")
        if [row for row, place in enumerate(self._due_places) if self._due.stands(place)] != [
            row for row, entry in enumerate(self._rows) if entry is not None
        ]:
            raise InvariantError(f"every row in use waits for its next age bin: {len(self._due)}")
        for held in slices.values():
            bucket, shown = held.bucket, held.shown
            if not (self._tops[bucket].stands(shown) and min(held.densities) >= shown.key >= self._head[bucket]):
                raise InvariantError(f"the head of a bucket is stale: {divmod(bucket, BINS)}")
            if self._ageing.stands(held.due) != (bucket % BINS < BINS - 1):
                raise InvariantError(f"a slice does not age: {divmod(bucket, BINS)}")
        if sum(map(len, self._tops)) != len(slices):
            raise InvariantError(f"slices in buckets, live are {len(slices)}: {sum(map(len, self._tops))}")
