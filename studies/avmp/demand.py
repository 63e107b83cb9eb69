"""What a request needs of every pool, and whether the budget could give it once some entries were evicted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from avmp.entries import Entry
from avmp.limits import LimitedBudget
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.memory.outlook import Outlook


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


class EntryOutlook(Outlook):
    """An Outlook without some entries, under the budget's limits."""

    def __init__(self, budget: LimitedBudget, gone: Iterable[Entry] = ()) -> None:
        super().__init__(budget)
        self.short: str | None = None  # the pool whose limit the last `fits` ran into
        self._limits = budget.limits
        for entry in gone:
            self.evict(entry)

    def evict(self, entry: Entry) -> None:
        """Suppose `entry` evicted."""
        self._shift(entry.pool, entry.by_column, 1)

    def keep(self, entry: Entry) -> None:
        """Take the supposition about `entry` back."""
        self._shift(entry.pool, entry.by_column, -1)

    def fits(self, pages: Mapping[str, int]) -> bool:
        """See Outlook; no pool may exceed its limit."""
        used = 0
        self.short = None
        for name in self._budget.pools:
            granules = self._used_after(name, pages.get(name, 0))
            if granules is None or granules > self._limits.get(name, self._budget.total):
                self.short = name
                return False
            used += granules
        return used <= self._budget.total


def plan_eviction(outlook: EntryOutlook, pages: Mapping[str, int], candidates: Sequence[Entry]) -> list[Entry] | None:
    """Entries to evict so that `pages` fit, from `candidates` in order of increasing loss; None if all do not suffice.

    Takes the cheapest until it fits, then spares, dearest first, each that turned out not to be needed: freeing KV
    pages helps a state only when whole columns run empty, so cheap entries can be useless.
    """
    chosen = []
    for entry in candidates:
        if outlook.fits(pages):
            break
        outlook.evict(entry)
        chosen.append(entry)
    if not outlook.fits(pages):
        return None
    needed = []
    for entry in reversed(chosen):
        outlook.keep(entry)
        if not outlook.fits(pages):
            outlook.evict(entry)
            needed.append(entry)
    return needed[::-1]
