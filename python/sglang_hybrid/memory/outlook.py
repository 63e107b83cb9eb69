"""Whether the budget could give pages once some others were freed."""

from collections.abc import Iterable, Mapping

from sglang_hybrid.memory.budget import Budget


class Outlook:
    """The pools as they would be without some of their live pages. Nothing is touched."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        budget.sort()
        self._room = {name: pool.room for name, pool in budget.pools.items()}
        self._emptied: dict[str, set[int]] = {name: set() for name in budget.pools}
        self._gone: dict[tuple[str, int], int] = {}  # pages of a column that would be freed

    def without(self, pool: str, by_column: Iterable[tuple[int, int]]) -> None:
        """Suppose pages of `pool` freed, so many in each column (see Pool.count_by_column)."""
        self._shift(pool, by_column, 1)

    def fits(self, pages: Mapping[str, int]) -> bool:
        """Whether every pool could then give these many pages, all at once."""
        used = 0
        for name in self._budget.pools:
            granules = self._used_after(name, pages.get(name, 0))
            if granules is None:
                return False
            used += granules
        return used <= self._budget.limit

    def _shift(self, name: str, by_column: Iterable[tuple[int, int]], sign: int) -> None:
        pool = self._budget.pools[name]
        emptied = self._emptied[name]
        for column, count in by_column:
            place = name, column
            self._gone[place] = self._gone.get(place, 0) + sign * count
            was, empty = column in emptied, self._gone[place] == pool.live_in(column)
            self._room[name] += sign * count + pool.layout.column_pages * (was - empty)
            if empty:
                emptied.add(column)
            else:
                emptied.discard(column)

    def _used_after(self, name: str, pages: int) -> int | None:
        """Granules that pool `name` would use once it gave `pages`; None if it has no addresses for them."""
        pool = self._budget.pools[name]
        columns = -(-max(0, pages - self._room[name]) // pool.layout.column_pages)
        return pool.columns.used_after(self._emptied[name], columns)
