"""A pool of pages over columns: the fullest column gives first, so the others run empty and their memory goes back."""

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.columns import LIVE, WARM, Columns
from sglang_hybrid.memory.layout import Layout

Pages = NDArray[np.int64]
_MANY_CUTS = 64


class Pool:
    """Pages 0..layout.pages-1 of one kind (KV, state, segment), each a fixed place in every plane for life.

    Free pages are kept per column, so no free page ever holds a column back: a column with no live page is WARM and may
    be unmapped at any time. `now` is the time stamp of columns that run empty. Not thread-safe; one scheduler owns it.
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
        power = per_column & (per_column - 1) == 0
        self._shift = per_column.bit_length() - 1 if power else None  # columns of pages without a division
        self._descending = np.arange(per_column - 1, -1, -1, dtype=np.int64)
        starts = np.arange(layout.columns, dtype=np.int64) * per_column
        self._stacks = list(starts[:, None] + self._descending)  # free pages of a column, the next one last
        self._free = [per_column] * layout.columns
        self._live = np.zeros(layout.pages, dtype=bool)
        self._live_rows = list(self._live.reshape(layout.columns, per_column))
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
        partial = self._partial
        if count and partial[0][0] > count:
            free, column = partial[0]
            left = free - count
            pages: Pages = self._stacks[column][left:free][::-1].copy()
            self._free[column] = left
            partial[0] = (left, column)  # still the fullest: it has fewer free pages than before
        else:
            pages = self._gather(count)
        self._live[pages] = True
        self.room -= count
        self.live_pages += count
        return pages

    def _extend(self, count: int) -> None:
        for column in self.budget.activate(self, self.columns_for(count)):
            insort(self._partial, (self._free[column], column))
            self.room += self._free[column]

    def _gather(self, count: int) -> Pages:
        parts = []
        need = count
        while need:
            free, column = self._partial.pop(0)
            take = min(free, need)
            parts.append(self._stacks[column][free - take : free][::-1])
            self._free[column] = free - take
            if free > take:
                insort(self._partial, (free - take, column))
            need -= take
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def free(self, pages: Pages) -> None:
        """Take back live `pages`; pages that are not live raise InvariantError and nothing changes."""
        if not len(pages):
            return
        parts = self._split(pages)
        self._unmark(pages, parts)
        for column, part in parts:
            self._give(column, part)
        self.room += len(pages)
        self.live_pages -= len(pages)
        for column, _ in parts:
            if self._free[column] == self._per_column and self.columns.state[column] == LIVE:
                self._empty(column)

    def _split(self, pages: Pages) -> list[tuple[int, Pages]]:
        """(column, pages) stretches that make up `pages`."""
        lowest = int(pages.min()) // self._per_column
        if int(pages.max()) // self._per_column == lowest:
            return [(lowest, pages)]
        columns = pages >> self._shift if self._shift is not None else pages // self._per_column
        cuts = np.flatnonzero(columns[1:] != columns[:-1])
        if len(cuts) > _MANY_CUTS:
            order = np.argsort(columns, kind="stable")
            pages, columns = pages[order], columns[order]
            cuts = np.flatnonzero(columns[1:] != columns[:-1])
        bounds = [0, *(cuts + 1).tolist(), len(pages)]
        return [(int(columns[start]), pages[start:stop]) for start, stop in pairwise(bounds)]

    def _unmark(self, pages: Pages, parts: list[tuple[int, Pages]]) -> None:
        """Clear the live marks of `pages`; as many marks must vanish as there are pages, else nothing changes."""
        freed: dict[int, int] = {}
        for column, part in parts:
            if not 0 <= column < len(self._free):
                raise InvariantError(f"free only pages of pool {self.name!r}: {column * self._per_column}")
            freed[column] = freed.get(column, 0) + len(part)
        self._live[pages] = False
        rows, free, full = self._live_rows, self._free, self._per_column
        exact = all(np.count_nonzero(rows[column]) == full - free[column] - count for column, count in freed.items())
        pinned = self.layout.pinned_pages
        if not exact or (pinned and not self._live[:pinned].all()):
            for column in freed:
                rows[column][:] = True
                self._live[self._stacks[column][: free[column]]] = False
            raise InvariantError(f"free a page of pool {self.name!r} once, while it is live: {pages[:8].tolist()}")

    def _give(self, column: int, part: Pages) -> None:
        free = self._free[column]
        if free:
            del self._partial[bisect_left(self._partial, (free, column))]
        self._stacks[column][free : free + len(part)] = part
        self._free[column] = free + len(part)
        insort(self._partial, (self._free[column], column))

    def _empty(self, column: int) -> None:
        del self._partial[bisect_left(self._partial, (self._per_column, column))]
        self.room -= self._per_column
        np.add(self._descending, column * self._per_column, out=self._stacks[column])
        self.columns.move(column, WARM, self.now)

    def count_by_column(self, pages: Pages) -> tuple[tuple[int, int], ...]:
        """(column, how many of `pages` lie in it), columns increasing."""
        columns, counts = np.unique(pages // self._per_column, return_counts=True)
        return tuple(zip(columns.tolist(), counts.tolist(), strict=True))

    def live_in(self, column: int) -> int:
        """Live pages in `column`."""
        return self._per_column - self._free[column]

    def check(self) -> None:
        """Raise InvariantError unless free lists, live marks, column states and totals tell one story."""
        self.columns.check()
        room = 0
        for column, state in enumerate(self.columns.state):
            first = column * self._per_column
            live = np.flatnonzero(self._live_rows[column]) + first
            whole = np.sort(np.concatenate([self._stacks[column][: self._free[column]], live]))
            if not np.array_equal(whole, np.arange(first, first + self._per_column)):
                raise InvariantError(f"free and live pages of pool {self.name!r} do not partition column: {column}")
            if (state == LIVE) != (len(live) > 0):
                raise InvariantError(f"column {column} of {self.name!r}, state {state}, has live pages: {len(live)}")
            room += self._free[column] if state == LIVE else 0
        wanted = sorted((f, c) for c, f in enumerate(self._free) if f and self.columns.state[c] == LIVE)
        if wanted != self._partial or room != self.room or int(self._live.sum()) != self.live_pages:
            raise InvariantError(f"pool {self.name!r} miscounts its room or its partial columns: {self.room}")
