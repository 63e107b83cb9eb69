"""The supplies of all kinds over one budget: what could be held now, and what is missing."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.outlook import Outlook
from sglang_hybrid.memory.sizing import Sizing
from sglang_hybrid.memory.supply import Agreement, PageSupply


class Holdings:
    """Supplies of KV, states and, if any, blocks of segments by name, and the budget they share. `clock` gives seconds.

    With `ranks` nothing that differs between them (time, what is mapped, who asked) has a say in which pages are had.
    """

    def __init__(
        self, sizing: Sizing, budget: Budget, clock: Callable[[], float], ranks: Agreement | None = None
    ) -> None:
        self.sizing = sizing
        self.budget = budget
        self.clock = clock
        self.ranks = ranks
        self.supplies: dict[str, PageSupply] = {}
        self.most_used = 0
        self.most_mapped = 0

    def tidy(self, wait: bool = False) -> None:
        """Make the books exact: what was freed since the last question is free memory now, as far as that is known.

        With `wait`, all of it.
        """
        if self.ranks is not None or wait or any(supply.untidy for supply in self.supplies.values()):
            self.sort(wait)

    def sort(self, wait: bool = False) -> None:
        """Put every free page on the books of its column, and note the high-water marks before."""
        self.most_used = max(self.most_used, self.budget.used)
        self.most_mapped = max(self.most_mapped, self.budget.mapped)
        now = self.clock()
        for supply in self.supplies.values():
            supply.pool.now = now
            if wait:
                supply.drain(wait)
            supply.pool.sort()

    def shortfall(self, pages: Mapping[str, int]) -> int | None:
        """Granules that are missing before each supply could hold `pages`; None if it has no addresses for them."""
        self.tidy()
        short = self._shortfall(pages)
        if short or (short is None and any(supply.waiting for supply in self.supplies.values())):
            self.sort(wait=True)  # a page given back after it was held may be all that keeps its column in use
            short = self._shortfall(pages)
        return short

    def _shortfall(self, pages: Mapping[str, int]) -> int | None:
        """The same by the columns as they stand."""
        wanted = 0
        for name, supply in self.supplies.items():
            wanted_columns = self._columns_for(name, pages)
            columns = supply.pool.columns
            if wanted_columns > len(columns.state) - columns.live_columns:
                return None
            wanted += columns.used_granules + wanted_columns * columns.column_granules
        return max(0, wanted - self.budget.limit)

    def crowded(self, pages: Mapping[str, int]) -> str:
        """The kind that has no addresses for its `pages` until some of its own are freed."""
        for name, supply in self.supplies.items():
            columns = supply.pool.columns
            if self._columns_for(name, pages) > len(columns.state) - columns.live_columns:
                return name
        raise InvariantError(f"every kind has addresses for its pages: {dict(pages)}")

    def _columns_for(self, name: str, pages: Mapping[str, int]) -> int:
        """Columns of a kind that must come into use before it could hold its `pages`."""
        supply = self.supplies[name]
        return supply.pool.columns_for(max(0, pages.get(name, 0) - len(supply.held)))

    def possible(self, pages: Mapping[str, int], gone: Mapping[str, Iterable[tuple[int, int]]]) -> bool:
        """Whether the supplies could hold `pages` if so many pages were evicted of each kind, by (column, how many)."""
        self.tidy()
        outlook = Outlook(self.budget)
        for name, by_column in gone.items():
            outlook.without(name, by_column)
        lacking = {
            name: max(0, count - len(self.supplies[name].held))
            for name, count in pages.items()
            if name in self.supplies
        }
        return outlook.fits(lacking)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While the machine gives no new memory, what is in use has to do: whoever needs more has others evicted."""
        self.sort(wait=True)
        self.budget.limit = self.budget.used
        try:
            yield
        finally:
            self.budget.limit = self.budget.total

    def reserve(self, pages: Mapping[str, int]) -> bool:
        """Hold `pages` of every kind, mapped, or none beyond what was held."""
        before = {name: len(self.supplies[name].held) for name in pages}
        if all(self.supplies[name].reserve(count) for name, count in pages.items()):
            return True
        for name, count in before.items():
            self.supplies[name].release_held(count)
        return False

    def release_held(self) -> None:
        """Hold nothing."""
        for supply in self.supplies.values():
            supply.release_held()
