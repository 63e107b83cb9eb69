"""What a request needs of every pool, and whether the budget could give it once some entries were evicted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.entries import Entry


@dataclass(frozen=True)
class Growth:
    """When a request takes its later pages: `at_once` at step `first` and every `every` steps after, until `end`.

    All in steps of the engine after admission. An upper bound: a request may take pages later, or end sooner.
    """

    first: int
    every: int
    end: int
    at_once: int = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.end < 0 or self.every < 1 or self.at_once < 1:
            raise ConfigError(f"growth needs steps >= 0, every >= 1 and at_once >= 1: {self}")


@dataclass(frozen=True)
class Demand:
    """Pages by pool name: `now` before the request starts, `later` as it grows (expected generation).

    Without `growth` the later pages are promised as if they were needed at once.
    """

    now: Mapping[str, int]
    later: Mapping[str, int] = field(default_factory=dict)
    growth: Growth | None = None

    def __post_init__(self) -> None:
        if any(count < 0 for count in (*self.now.values(), *self.later.values())):
            raise ConfigError(f"a request cannot need a negative number of pages: {self}")


class Outlook:
    """The pools as they would be without some entries. Nothing is touched; each entry is one increment."""

    def __init__(self, budget: Budget, gone: Iterable[Entry] = ()) -> None:
        self.short: str | None = None  # the pool whose limit the last `fits` ran into
        self._budget = budget
        for pool in budget.pools.values():
            pool.sort()
        self._room = {name: pool.room for name, pool in budget.pools.items()}
        self._emptied: dict[str, set[int]] = {name: set() for name in budget.pools}
        self._gone: dict[tuple[str, int], int] = {}  # pages of a column that would be freed
        for entry in gone:
            self.without(entry)

    def without(self, entry: Entry) -> None:
        """Suppose `entry` evicted."""
        self._shift(entry, 1)

    def keep(self, entry: Entry) -> None:
        """Take the supposition about `entry` back."""
        self._shift(entry, -1)

    def _shift(self, entry: Entry, sign: int) -> None:
        pool = self._budget.pools[entry.pool]
        emptied = self._emptied[entry.pool]
        for column, count in entry.by_column:
            place = entry.pool, column
            self._gone[place] = self._gone.get(place, 0) + sign * count
            was, empty = column in emptied, self._gone[place] == pool.live_in(column)
            self._room[entry.pool] += sign * count + pool.layout.column_pages * (was - empty)
            if empty:
                emptied.add(column)
            else:
                emptied.discard(column)

    def fits(self, pages: Mapping[str, int]) -> bool:
        """Whether every pool could then give these many pages, all at once."""
        used = 0
        self.short = None
        for name, pool in self._budget.pools.items():
            columns = -(-max(0, pages.get(name, 0) - self._room[name]) // pool.columns.layout.column_pages)
            granules = pool.columns.used_after(self._emptied[name], columns)
            if granules is None or granules > self._budget.limits.get(name, self._budget.total):
                self.short = name
                return False
            used += granules
        return used <= self._budget.total


def plan_eviction(outlook: Outlook, pages: Mapping[str, int], candidates: Sequence[Entry]) -> list[Entry] | None:
    """Entries to evict so that `pages` fit, from `candidates` in order of increasing loss; None if all do not suffice.

    Takes the cheapest until it fits, then spares, dearest first, each that turned out not to be needed: freeing KV
    pages helps a state only when whole columns run empty, so cheap entries can be useless.
    """
    chosen = []
    for entry in candidates:
        if outlook.fits(pages):
            break
        outlook.without(entry)
        chosen.append(entry)
    if not outlook.fits(pages):
        return None
    needed = []
    for entry in reversed(chosen):
        outlook.keep(entry)
        if not outlook.fits(pages):
            outlook.without(entry)
            needed.append(entry)
    return needed[::-1]
