"""A pool of pages over columns: the fullest column gives first, so the others run empty and their memory goes back."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.memory.columns import LIVE, WARM, Columns
from sglang_hybrid.memory.layout import Layout

Pages = NDArray[np.int64]
_AHEAD = 256  # pages drawn from a column at least: a decode step takes a few, and a draw costs the same
_FEW = 256
_SORT_AT = 1 << 15  # loose pages that are sorted unasked, so that no sort takes long


class Pool:
    """Pages 0..layout.pages-1 of one kind (KV, state, segment), each a fixed place in every plane for life.

    sorted  a free page on the books of its column. A column whose pages are all sorted is WARM or UNMAPPED, so no
            free page ever holds memory back.
    loose   a free page on a stack, handed out next. Its column stays LIVE until `sort` puts the page on its books.
    live    handed out; the caller owns it until `free`.

    Freeing makes pages loose, one slice each way while nobody asks about memory. Whoever decides about memory sorts
    first, so no decision rests on a loose page. When no page is loose the fullest column gives, lowest pages first.
    `now` is the time stamp of columns that run empty. Not thread-safe; one scheduler owns it.

    Budget.add_pool makes pools. `activate` makes so many columns of the pool LIVE, all or nothing; see Budget.activate.

    With `by_index` columns come into use by index, mapped or not. Pages drawn after a `sort` then follow from the live
    ones alone, so pools on several ranks with the same history hold the same pages.

    A page freed twice, or never handed out, is an InvariantError by the next `sort` at the latest.
    """

    def __init__(
        self,
        layout: Layout,
        activate: Callable[[int], list[int]],
        first_plane: int = 0,
        by_index: bool = False,
    ) -> None:
        self.layout = layout
        self.name = layout.name
        self.now = 0.0
        self.live_pages = 0
        self.recall: Callable[[], None] | None = None  # asks who hoards live pages unused to free them; before a sort
        self.columns = Columns(layout, first_plane, by_index)  # as they stand: loose pages keep theirs LIVE
        self._per_column = layout.column_pages
        self._pages = self._head = layout.pages
        self._stack = np.empty(self._pages, dtype=np.int64)  # loose pages: _stack[_head:], next one first
        self._marks = np.ones(self._pages, dtype=np.bool_)  # whether a page is sorted
        self._free = np.full(layout.columns, self._per_column, dtype=np.int64)  # sorted pages by column
        self._states = np.frombuffer(self.columns.state, dtype=np.uint8)  # the same memory
        self._sorted_room = 0  # sorted pages in LIVE columns
        self._activate = activate

    def pin(self) -> None:
        """Take the pinned pages, before any other. Raises PoolExhausted when the budget cannot hold them."""
        pinned = self.alloc(self.layout.pinned_pages)
        if not np.array_equal(pinned, np.arange(len(pinned))):
            raise InvariantError(f"pinned pages must be the first: {pinned}")

    @property
    def room(self) -> int:
        """Free pages, loose or sorted, in LIVE columns: to be had without another column."""
        return self._pages - self._head + self._sorted_room

    def columns_for(self, pages: int) -> int:
        """Columns that must become LIVE before `pages` more pages can be had."""
        return -(-max(0, pages - self.room) // self._per_column)

    def alloc(self, count: int) -> Pages:
        """`count` page ids, int64; all or nothing. Raises PoolExhausted when the budget has no room for them."""
        head = self._head
        end = head + count
        if end > self._pages:
            return self._draw(count)
        self._head = end
        self.live_pages += count
        return self._stack[head:end].copy()

    def free(self, pages: NDArray[np.integer[Any]]) -> None:
        """Take back live `pages` (any integer dtype, any order); the array stays the caller's. See the class."""
        count = len(pages)
        head = self._head
        start = head - count
        if count > self.live_pages - self.layout.pinned_pages:
            raise InvariantError(f"free a page of pool {self.name!r} once, while it is live: {count} pages")
        self._stack[start:head] = pages
        self._head = start
        self.live_pages -= count
        if self._pages - start > _SORT_AT:
            self._sort()

    def clear(self) -> None:
        """Take back every live page but the pinned ones: whoever holds one must forget it."""
        if self._head < self._pages:
            self._sort()
        live = np.flatnonzero(~self._marks)[self.layout.pinned_pages :]
        for start in range(0, len(live), _SORT_AT):
            self.free(live[start : start + _SORT_AT])
        self.sort()

    def sort(self) -> None:
        """Put every loose page on the books of its column; columns that are empty then turn WARM."""
        if self.recall is not None:
            self.recall()
        if self._head < self._pages:
            self._sort()

    def _sort(self) -> None:
        loose = self._stack[self._head :]
        self._mark_sorted(loose)
        free, size = self._free, self._per_column
        counts = np.bincount(loose // size)
        free[: len(counts)] += counts
        emptied = np.flatnonzero((free[: len(counts)] == size) & (counts > 0)).tolist()
        self._sorted_room += len(loose) - len(emptied) * size
        self._head = self._pages
        self.columns.move(emptied, WARM, self.now)

    def _mark_sorted(self, loose: Pages) -> None:
        """Mark `loose`; an InvariantError, with nothing changed, if they are not distinct pages that were live."""
        marks = self._marks
        if self._is_inside(loose) and not marks.take(loose).any():
            if len(loose) * _FEW < self._pages:  # counting all marks would cost more than sorting these
                distinct = len(np.unique(loose)) == len(loose)
                marks[loose] = distinct
            else:
                marks[loose] = True
                distinct = np.count_nonzero(marks) == self._pages - self.live_pages
                marks[loose] = distinct
            if distinct:
                return
        raise InvariantError(f"pages of pool {self.name!r} were freed twice or while not live: {loose[:8].tolist()}")

    def _is_inside(self, pages: Pages) -> bool:
        """Whether all of `pages` are pages of the pool that can be handed out."""
        return not len(pages) or (int(pages.min()) >= self.layout.pinned_pages and int(pages.max()) < self._pages)

    def _draw(self, count: int) -> Pages:
        """`count` pages: the loose ones, then from columns, a few more becoming loose."""
        if count > self.room:
            self.sort()  # columns that are empty by now count as such
            columns = self._activate(self.columns_for(count))
            self._sorted_room += len(columns) * self._per_column
        parts = [self._stack[self._head :].copy()]
        need = count - len(parts[0])
        self._head = self._pages
        givers = np.flatnonzero((self._states == LIVE) & (self._free > 0))
        givers = givers[np.argsort(self._free[givers], kind="stable")]
        for column in givers.tolist():
            if not need:
                break
            taken = self._take(column, max(need, _AHEAD))
            parts.append(taken[:need])
            self._head -= max(0, len(taken) - need)
            self._stack[self._head :] = taken[need:]
            need -= len(parts[-1])
        self.live_pages += count
        return np.concatenate(parts)

    def _take(self, column: int, most: int) -> Pages:
        """The lowest sorted pages of a LIVE `column`, `most` of them if there are so many, off its books."""
        first = column * self._per_column
        free = int(self._free[column])
        stop = first + self._per_column
        if free == self._per_column:
            pages = np.arange(first, min(first + most, stop))
        else:
            pages = (np.flatnonzero(self._marks[first:stop]) + first)[:most]
        self._marks[pages] = False
        self._free[column] = free - len(pages)
        self._sorted_room -= len(pages)
        return pages

    def count_by_column(self, pages: Pages) -> tuple[tuple[int, int], ...]:
        """(column, how many of `pages` lie in it), columns increasing."""
        columns, counts = np.unique(pages // self._per_column, return_counts=True)
        return tuple(zip(columns.tolist(), counts.tolist(), strict=True))

    def live_in(self, column: int) -> int:
        """Pages in `column` that are live or loose."""
        return self._per_column - int(self._free[column])

    def check(self) -> None:
        """Raise InvariantError unless marks, loose pages, column states and totals tell one story. Sorts nothing."""
        self.columns.check()
        sorted_pages = np.add.reduceat(self._marks, np.arange(0, self._pages, self._per_column), dtype=np.int64)
        if not np.array_equal(sorted_pages, self._free):
            wrong = int(np.flatnonzero(sorted_pages != self._free)[0])
            raise InvariantError(
                f"column {wrong} of pool {self.name!r} miscounts its sorted pages: {self._free[wrong]}"
            )
        wrong_state = np.flatnonzero((self._states == LIVE) != (self._free < self._per_column))
        if len(wrong_state):
            raise InvariantError(f"column of {self.name!r} is live without a live or loose page: {int(wrong_state[0])}")
        loose = self._stack[self._head :]
        if len(np.unique(loose)) != len(loose) or self._marks[loose].any():
            raise InvariantError(f"loose pages of pool {self.name!r} are doubled or sorted as well: {len(loose)}")
        room = int(self._free[self._states == LIVE].sum())
        live = self._pages - int(np.count_nonzero(self._marks)) - len(loose)
        if (room, live) != (self._sorted_room, self.live_pages):
            raise InvariantError(f"pool {self.name!r} miscounts its room and live pages: {(room, live)}")
        pinned = self.layout.pinned_pages
        if self._marks[:pinned].any() or (loose < pinned).any():
            raise InvariantError(f"a pinned page of pool {self.name!r} is free: {pinned}")
