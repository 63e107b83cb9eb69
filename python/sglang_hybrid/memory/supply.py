"""Pages of one kind as a scheduler takes and frees them, in front of a pool."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.meter import Meter
from sglang_hybrid.memory.pool import Pool

Ids = NDArray[np.int64]
_NONE = np.empty(0, dtype=np.int64)


class Copy(Protocol):
    """A copy of some page ids that was begun."""

    at_once: bool
    """Whether it was done when it was begun, on every rank."""

    def done(self) -> bool:
        """Whether `ids` would not wait."""

    def ids(self) -> Ids:
        """The ids on the host, int64."""


class AtHand:
    """Ids that were on the host all along."""

    at_once = True

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def done(self) -> bool:
        return True

    def ids(self) -> Ids:
        return self._ids


class Agreement(Protocol):
    """What a supply asks of the other ranks; every rank asks the same questions in the same order."""

    def agree(self, success: bool, account: Sequence[int]) -> bool:
        """Whether all ranks had success. Raises InvariantError if their accounts differ."""


class PageSupply:
    """Who owns a page: the scheduler (`taken`), this object (`held`: reserved, its memory mapped), or the pool.

    What the scheduler frees waits in `_returned` while its ids are copied to the host, and longer if nobody asks about
    memory: an answer counts what has arrived, and waits for the rest only where pages are short. `tidy` is called
    before every answer about memory, with whether to wait.

    With `ranks` every answer follows from the pages that are live and held, and from the number of passes: a copy then
    counts two passes after it was begun, when what it waits for has ended. Pages that need another column are had on
    all ranks or on none.
    """

    def __init__(
        self,
        budget: Budget,
        pool: Pool,
        tidy: Callable[..., None],
        grown: Meter,
        ranks: Agreement | None = None,
        passes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.budget = budget
        self.pool = pool
        self.held = _NONE
        self._tidy = tidy
        self._grown = grown
        self._ranks = ranks
        self._passes = passes
        self._returned: list[tuple[Copy, int, int]] = []  # with the number of pages, and of the pass
        self._returned_pages = 0
        pool.recall = self.drain

    @property
    def untidy(self) -> bool:
        """Whether pages wait that the pool could know to be free."""
        return bool(self._returned) and self._arrived(*self._returned[0])

    @property
    def waiting(self) -> bool:
        """Whether pages wait that the pool does not know to be free."""
        return self._returned_pages > 0

    @property
    def available(self) -> int:
        """Pages that could be had now without evicting anything, taking all free memory of the budget."""
        self._tidy()
        return len(self.held) + self.budget.obtainable(self.pool)

    @property
    def at_hand(self) -> int:
        """Pages that cost no question about memory: held, returned, or in columns that are in use anyway."""
        if self._ranks is not None:
            self._tidy()
        else:
            self.drain()
        return len(self.held) + self.pool.room

    @property
    def taken(self) -> int:
        """Pages that the scheduler has."""
        return self.pool.live_pages - self.pool.layout.pinned_pages - len(self.held) - self._returned_pages

    def hand_out(self, count: int) -> Ids | None:
        """`count` pages, int64, held ones first; None if the rest cannot be had."""
        if not self._top_up(count):
            return None
        pages, self.held = self.held[:count], self.held[count:]
        return pages

    def reserve(self, count: int) -> bool:
        """Hold `count` pages, mapped; whether that worked. What was held before stays held."""
        return self._top_up(count)

    def release_held(self, keep: int = 0) -> None:
        """Give held pages beyond `keep` back to the pool."""
        if len(self.held) > keep:
            surplus, self.held = self.held[keep:], self.held[:keep]
            self.pool.free(surplus)

    def take_back(self, copy: Copy, pages: int) -> None:
        """The scheduler frees `pages` of them, whose ids `copy` brings."""
        self._returned.append((copy, pages, self._passes()))
        self._returned_pages += pages

    def drain(self, wait: bool = False) -> None:
        """Tell the pool what was freed: all of it if this may `wait`, else what has arrived."""
        arrived = len(self._returned)
        if not wait:
            arrived = next((at for at, each in enumerate(self._returned) if not self._arrived(*each)), arrived)
        while arrived:  # the last first, as from a stack
            arrived -= 1
            copy, pages, _ = self._returned.pop(arrived)
            self._returned_pages -= pages
            self.pool.free(copy.ids())

    def _arrived(self, copy: Copy, _: int, begun: int) -> bool:
        if self._ranks is None or copy.at_once:
            return copy.done()
        return self._passes() >= begun + 2

    def clear(self) -> None:
        """The scheduler forgets every page it has."""
        self._returned, self._returned_pages, self.held = [], 0, _NONE
        self.pool.clear()

    def census(self) -> dict[str, Any]:
        """Pages by owner, and how full the columns in use are."""
        columns = self.pool.columns
        live_pages = columns.live_columns * self.pool.layout.column_pages
        return {
            "taken": self.taken,
            "held": len(self.held),
            "granules": columns.used_granules,
            "free_granules": columns.mapped_granules - columns.used_granules,
            "fragmentation": 1.0 - (self.pool.live_pages - self._returned_pages) / live_pages if live_pages else 0.0,
        }

    def _top_up(self, count: int) -> bool:
        short = count - len(self.held)
        if short <= 0:
            return True
        if self._ranks is not None:
            self._tidy()
        elif short > self.pool.room:
            self.drain()
        if short > self.pool.room and self.budget.obtainable(self.pool) < short:
            self._tidy(wait=True)
        if short <= self.pool.room:
            self._draw(short)
            return True
        before = len(self.held)
        granules = self.pool.columns_for(short) * self.pool.columns.column_granules
        try:
            self._grown.timed(lambda: self._draw(short), granules)
            had = True
        except PoolExhausted:
            had = False
        if self._ranks is not None and not self._ranks.agree(had, (count, before, self.pool.live_pages - had * short)):
            had = False
            self.release_held(before)
        return had

    def _draw(self, count: int) -> None:
        fresh = self.pool.alloc(count)
        self.held = np.concatenate((self.held, fresh)) if len(self.held) else fresh
