"""A pool of pages over columns: the fullest column gives first, so the others run empty and their memory goes back."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.columns import LIVE, WARM, Columns
from sglang_hybrid.memory.layout import Layout

Pages = NDArray[np.int64]
_LONG_RUN = 128  # so many consecutive pages are cheaper as one slice than as scattered writes
_LIVE, _FREE = 0, 1  # marks of a page


class Pool:
    """Pages 0..layout.pages-1 of one kind (KV, state, segment), each a fixed place in every plane for life.

    A page is free or live by its mark; a column counts its free marks, so no free page ever holds a column back: a
    column with no live page is WARM and may be unmapped at any time. The fullest column gives first, its lowest pages
    first, which keeps requests in runs of consecutive pages: a run costs one slice, not one write per page.
    `now` is the time stamp of columns that run empty. Not thread-safe; one scheduler owns it.
    """

    def __init__(self, layout: Layout, budget: Budget, first_plane: int = 0) -> None:
        self.layout = layout
        self.name = layout.name
        self.budget = budget
        self.columns = Columns(layout, first_plane)
        self.now = 0.0
        self.room = 0  # free pages in LIVE columns
        self.live_pages = 0
        per_column = self._per_column = layout.column_pages
        self._id_bytes = np.arange(layout.pages, dtype=np.int64).tobytes()  # to compare runs of ids as memory
        self._ids = np.frombuffer(self._id_bytes, dtype=np.int64)
        self._bytes = bytearray([_FREE]) * layout.pages  # the marks; find() in them is a memory scan
        self._marks = np.frombuffer(self._bytes, dtype=np.bool_)  # the same memory
        self._free = [per_column] * layout.columns
        self._partial: list[tuple[int, int]] = []  # (free pages, column) of LIVE columns with a free page, sorted
        budget.attach(self)
        if layout.pinned_pages:
            self._pin(layout.pinned_pages)

    def _pin(self, count: int) -> None:
        try:
            pinned = self.alloc(count)
        except PoolExhausted as error:
            del self.budget.pools[self.name]
            raise ConfigError(f"raise the budget: it cannot hold the pinned pages of {self.name!r}: {error}") from error
        if not np.array_equal(pinned, np.arange(count)):
            raise InvariantError(f"pinned pages must be the first: {pinned}")

    def columns_for(self, pages: int) -> int:
        """Columns that must become LIVE before `pages` more pages can be had."""
        return -(-max(0, pages - self.room) // self._per_column)

    def alloc(self, count: int) -> Pages:
        """`count` page ids, int64; all or nothing. Raises PoolExhausted when the budget has no room for them."""
        if count > self.room:
            self._extend(count)
        parts: list[Pages] = []
        partial, size, need, marks = self._partial, self._per_column, count, self._bytes
        start = end = 0  # the run being gathered; it may reach over columns
        while need > 0:
            free, column = partial[0]
            take = free if free < need else need
            first = column * size
            low = marks.find(_FREE, first, first + size) if free < size else first
            high = low + take
            if high > first + size or (free < size and marks.find(_LIVE, low, high) >= 0):
                self._cut(start, end, parts)
                start = end = 0
                parts.append(self._take_scattered(low, first + size, take))
            elif low == end:
                end = high
            else:
                self._cut(start, end, parts)
                start, end = low, high
            left = self._free[column] = free - take
            if left:
                partial[0] = (left, column)  # still the fullest: it has fewer free pages than before
            else:
                del partial[0]
            need -= take
        self.room -= count
        self.live_pages += count
        if not parts:
            self._marks[start:end] = False
            return self._ids[start:end].copy()
        self._cut(start, end, parts)
        return np.concatenate(parts)

    def _cut(self, start: int, end: int, parts: list[Pages]) -> None:
        """Mark the run start to end live and append it to `parts`."""
        if start < end:
            self._marks[start:end] = False
            parts.append(self._ids[start:end])

    def _take_scattered(self, low: int, stop: int, count: int) -> Pages:
        """Mark the first `count` free pages from `low` to `stop` live; there are that many."""
        pages = np.flatnonzero(self._marks[low:stop])[:count] + low
        self._marks[pages] = False
        return pages

    def _extend(self, count: int) -> None:
        for column in self.budget.activate(self, self.columns_for(count)):
            insort(self._partial, (self._per_column, column))
            self.room += self._per_column

    def free(self, pages: Pages) -> None:
        """Take back live `pages`; pages that are not live raise InvariantError and nothing changes."""
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        gained: dict[int, int] = {}  # column -> pages
        runs: list[tuple[int, int]] = []
        rest = pages
        while count := len(rest):
            first = rest.item(0)
            length = self._run(rest, first)
            if not (self._mark_run(first, first + length, gained) if length else self._mark_scattered(rest, gained)):
                for start, end in runs:
                    self._marks[start:end] = False
                raise InvariantError(f"free a page of pool {self.name!r} once, while it is live: {pages[:8].tolist()}")
            if length in (0, count):
                break
            runs.append((first, first + length))
            rest = rest[length:]
        self.room += len(pages)
        self.live_pages -= len(pages)
        emptied = [column for column, count in gained.items() if self._give(column, count)]
        if emptied:
            self.room -= len(emptied) * self._per_column
            self.columns.move(emptied, WARM, self.now)

    def _run(self, pages: Pages, first: int) -> int:
        """How many of `pages`, from `first` on, are consecutive pages of this pool; 0 if too few to matter."""
        count = len(pages)
        if first < self.layout.pinned_pages:
            return 0
        if self._id_bytes.startswith(pages.data, first * 8):
            return count
        enough = min(_LONG_RUN, -(-count // 4))
        if pages.item(enough - 1) != first + enough - 1:
            return 0
        run = self._ids[first : first + count]
        differs = pages[: len(run)] != run
        at = int(differs.argmax()) if len(run) else 0
        length = at if len(run) and differs[at] else len(run)
        return length if length >= enough else 0

    def _mark_run(self, start: int, end: int, gained: dict[int, int]) -> bool:
        """Mark a run free; False, with nothing changed, unless all of it is live."""
        if self._bytes.find(_FREE, start, end) >= 0:
            return False
        self._marks[start:end] = True
        column = start // self._per_column
        while start < end:
            stop = (column + 1) * self._per_column
            if stop > end:
                stop = end
            gained[column] = gained.get(column, 0) + stop - start
            start, column = stop, column + 1
        return True

    def _mark_scattered(self, pages: Pages, gained: dict[int, int]) -> bool:
        """Mark pages in any order free; False, with nothing changed, unless all are live and none comes twice."""
        if int(pages.min()) < self.layout.pinned_pages or int(pages.max()) >= len(self._bytes):
            return False
        if self._marks.take(pages).any():
            return False
        self._marks[pages] = True
        counts = np.bincount(pages // self._per_column)
        for column in np.flatnonzero(counts).tolist():
            count = gained[column] = gained.get(column, 0) + int(counts[column])
            first = column * self._per_column
            if self._bytes.count(_FREE, first, first + self._per_column) != self._free[column] + count:
                self._marks[pages] = False
                return False
        return True

    def _give(self, column: int, count: int) -> bool:
        """Count `count` more free pages in LIVE `column`; whether it has no live page left."""
        was = self._free[column]
        free = self._free[column] = was + count
        if was:
            del self._partial[bisect_left(self._partial, (was, column))]
        if free == self._per_column:
            return True
        insort(self._partial, (free, column))
        return False

    def count_by_column(self, pages: Pages) -> tuple[tuple[int, int], ...]:
        """(column, how many of `pages` lie in it), columns increasing."""
        columns, counts = np.unique(pages // self._per_column, return_counts=True)
        return tuple(zip(columns.tolist(), counts.tolist(), strict=True))

    def live_in(self, column: int) -> int:
        """Live pages in `column`."""
        return self._per_column - self._free[column]

    def check(self) -> None:
        """Raise InvariantError unless marks, column states and totals tell one story."""
        self.columns.check()
        room = 0
        for column, state in enumerate(self.columns.state):
            first = column * self._per_column
            free = int(np.count_nonzero(self._marks[first : first + self._per_column]))
            if free != self._free[column]:
                raise InvariantError(f"column {column} of pool {self.name!r} counts {self._free[column]} free: {free}")
            if (state == LIVE) != (free < self._per_column):
                raise InvariantError(f"column {column} of {self.name!r}, state {state}, has free pages: {free}")
            room += free if state == LIVE else 0
        wanted = sorted((f, c) for c, f in enumerate(self._free) if f and self.columns.state[c] == LIVE)
        live = len(self._marks) - int(np.count_nonzero(self._marks))
        if wanted != self._partial or room != self.room or live != self.live_pages:
            raise InvariantError(f"pool {self.name!r} miscounts its room or its partial columns: {self.room}")
        if self._marks[: self.layout.pinned_pages].any():
            raise InvariantError(f"a pinned page of pool {self.name!r} is free: {self.layout.pinned_pages}")
