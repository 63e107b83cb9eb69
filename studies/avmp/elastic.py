"""Elastic memory: requests are admitted whole or not at all, never robbed, and idle memory goes back.

Rules (compare AVMP 3.2, which evicts running requests first):
1. A granule takes the kind of whoever needs it.
2. A request starts only if its prompt and its expected generation fit over all pools, beside what running requests were
   promised; it may count on unreferenced entries, because
3. only those are evicted, of whichever pool loses least value per byte, and only when that lets a request go on.
4. Every decision depends on the calls made so far and on nothing else; idleness is counted in calls.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from avmp.demand import Demand, EntryOutlook, plan_eviction
from avmp.entries import Entries, Entry
from avmp.lease import NO_PAGES, Lease, Pages, outstanding, union
from avmp.limits import LimitedBudget, page_bytes
from avmp.rebalance import OnDemand, RebalancePolicy, apply
from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.memory.layout import Layout


class Elastic:
    """The policy over one budget. It owns leases and entries; the pools own the pages.

    `step` is the engine's step, set by the caller; it matters only for demands with a growth bound.
    """

    def __init__(
        self, budget: LimitedBudget, smallest: Demand | None = None, rebalance: RebalancePolicy | None = None
    ) -> None:
        self.budget = budget
        self.entries = Entries()
        self.leases: dict[int, Lease] = {}
        self.step = 0
        self.operations = 0
        self.rebalance = rebalance or OnDemand()
        if smallest is not None:
            self._require_possible(smallest)

    def admit(self, request_id: int, demand: Demand, uses: Sequence[int] = ()) -> tuple[Lease, list[int]]:
        """Start a request that reads the entries `uses`: its lease, and the keys of the entries evicted for it.

        Raises PoolExhausted, with nothing evicted, when running requests hold what is needed (wait for one to end), and
        ConfigError when the demand exceeds the whole budget (waiting would never help).
        """
        if request_id in self.leases:
            raise InvariantError(f"a request can be admitted once at a time: {request_id}")
        self._tick()
        self._require_possible(demand)
        lease = Lease(request_id, self.step, tuple(uses), demand.growth)
        first = {}
        for name, pool in self.budget.pools.items():
            now, later = demand.now.get(name, 0), demand.later.get(name, 0)
            lease.later[name] = lease.promised[name] = later if pool.layout.exclusive else 0
            lease.pages[name] = lease.spare[name] = NO_PAGES
            first[name] = now + later - lease.promised[name]
        lease.pending = first
        for key in lease.uses:
            self.entries.lock(key)
        try:
            evicted = self._secure(first, [*self.leases.values(), lease])
            self.budget.sort()  # pages of evicted entries may have emptied columns
            for name in sorted(first, key=lambda name: self.budget.pools[name].layout.exclusive):
                taken = self.budget.pools[name].alloc(first[name])
                now = demand.now.get(name, 0)
                lease.pages[name], lease.spare[name] = taken[:now], taken[now:]
            lease.pending = {}
        except PoolExhausted:
            self._free(lease)
            for key in lease.uses:
                self.entries.unlock(key)
            raise
        self.leases[request_id] = lease
        return lease, evicted

    def extend(self, lease: Lease, pool: str, count: int) -> tuple[Pages, list[int]]:
        """`count` more pages for a running request, and the keys evicted for them.

        Within its promise this cannot fail for lack of budget; beyond it, PoolExhausted as in `admit`.
        """
        self._tick()
        ahead = min(count, len(lease.spare[pool]))
        rest = count - ahead
        due = min(rest, lease.due(pool, self.step))
        evicted: list[int] = []
        promised = lease.promised[pool]
        lease.promised[pool] = promised - min(rest, promised)
        try:
            if rest > due or rest > self.budget.pools[pool].room:
                lease.pending = {pool: rest}
                evicted = self._secure({pool: rest}, list(self.leases.values()))
            fresh = self.budget.pools[pool].alloc(rest)
        except PoolExhausted:
            lease.promised[pool] = promised
            raise
        finally:
            lease.pending = {}
        pages = np.concatenate([lease.spare[pool][:ahead], fresh])
        lease.spare[pool] = lease.spare[pool][ahead:]
        lease.pages[pool] = np.concatenate([lease.pages[pool], pages])
        return pages, evicted

    def finish(self, lease: Lease, keep: Mapping[int, tuple[str, Pages, float]] | None = None) -> None:
        """End a request. `keep` turns some of its pages into entries: key -> (pool, pages, value). Frees the rest."""
        self._tick()
        if self.leases.get(lease.request_id) is not lease:
            raise InvariantError(f"finish a running request once: {lease.request_id}")
        for name, held in lease.pages.items():
            kept = [pages for pool, pages, _ in (keep or {}).values() if pool == name]
            chosen = np.concatenate(kept) if kept else NO_PAGES
            if len(np.unique(chosen)) != len(chosen) or not np.isin(chosen, held).all():
                raise InvariantError(
                    f"keep each page of {name!r} once, and only those the request holds: {len(chosen)}"
                )
        for key, (name, pages, value) in (keep or {}).items():
            pool = self.budget.pools[name]
            size_bytes = len(pages) * page_bytes(pool.layout)
            self.entries.add(Entry(key, name, pages, value, size_bytes, pool.count_by_column(pages)))
            lease.pages[name] = np.setdiff1d(lease.pages[name], pages)
        del self.leases[lease.request_id]
        for key in lease.uses:
            self.entries.unlock(key)
        self._free(lease)

    def evict(self, key: int) -> None:
        """Drop an unreferenced entry and free its pages."""
        self._tick()
        self._drop(self.entries.remove(key))

    def settle(self) -> int:
        """Return idle memory (Budget.settle) and count one operation; the granules unmapped."""
        self._tick()
        return self.budget.settle(self.operations)

    def check(self) -> None:
        """Raise InvariantError unless leases and entries hold exactly the live pages and every promise can be met."""
        self.budget.check()
        self.entries.check()
        for name, pool in self.budget.pools.items():
            held = [part for lease in self.leases.values() for part in (lease.pages[name], lease.spare[name])]
            held += [entry.pages for entry in self.entries if entry.pool == name]
            pages = np.concatenate(held) if held else NO_PAGES
            if len(pages) + pool.layout.pinned_pages != pool.live_pages or len(np.unique(pages)) != len(pages):
                raise InvariantError(f"pages of pool {name!r} are held twice or by nobody: {pool.live_pages}")
        promised = outstanding(list(self.leases.values()), list(self.budget.pools), self.step)
        if not EntryOutlook(self.budget, self.entries.evictable()).fits(promised):
            raise InvariantError(f"promises cannot be met: {promised}")

    def _secure(self, first: Mapping[str, int], leases: Sequence[Lease]) -> list[int]:
        """Evict what `first` needs now, if all of `leases` can then still end; the keys evicted."""
        whole = {name: sum(lease.promised[name] for lease in leases) for name in self.budget.pools}
        if EntryOutlook(self.budget).fits(union(first, whole)):
            return []
        candidates = self.entries.evictable()
        possible = self._possible(first, leases, candidates)
        if not possible:
            transfer = self.rebalance.decide(self.budget)
            if transfer is not None:
                apply(self.budget, transfer)
                possible = self._possible(first, leases, candidates)
        chosen = plan_eviction(EntryOutlook(self.budget), first, candidates) if possible else None
        if chosen is None:
            raise PoolExhausted(f"wait for a running request to end; the budget is in use: {dict(first)}")
        for entry in chosen:
            self._drop(self.entries.remove(entry.key))
        return [entry.key for entry in chosen]

    def _possible(self, first: Mapping[str, int], leases: Sequence[Lease], candidates: Sequence[Entry]) -> bool:
        """Whether `first` and every promise of `leases` would fit without `candidates`; the cheap answer first."""
        outlook = EntryOutlook(self.budget, candidates)
        if outlook.fits(first):
            whole = outstanding(leases, list(self.budget.pools), self.step)
            if outlook.fits(union(first, whole)):
                return True
        self.budget.refused = outlook.short
        return False

    def _require_possible(self, demand: Demand) -> None:
        """Raise ConfigError for a demand that an idle machine could not meet."""
        unknown = ({*demand.now, *demand.later}) - set(self.budget.pools)
        if unknown:
            raise ConfigError(f"a request may need {sorted(self.budget.pools)} and nothing else: {sorted(unknown)}")
        total = 0
        for name, pool in self.budget.pools.items():
            pages = demand.now.get(name, 0) + demand.later.get(name, 0) + pool.layout.pinned_pages
            columns = -(-pages // pool.layout.column_pages)
            granules = _least(pool.layout, columns) if columns <= pool.layout.columns else self.budget.total + 1
            fixed = self.budget.limits.get(name) if isinstance(self.rebalance, OnDemand) else None
            if fixed is not None and granules > fixed:
                raise ConfigError(f"raise the share of pool {name!r}, too small for one request: {fixed} granules")
            total += granules
        if total > self.budget.total:
            needed = total * self.budget.granule_bytes
            raise ConfigError(
                f"raise the budget to {needed} bytes or shorten the request: {self.budget.total} granules"
            )

    def _tick(self) -> None:
        self.operations += 1
        for pool in self.budget.pools.values():
            pool.now = float(self.operations)

    def _drop(self, entry: Entry) -> None:
        self.budget.pools[entry.pool].free(entry.pages)

    def _free(self, lease: Lease) -> None:
        for name, pool in self.budget.pools.items():
            pool.free(np.concatenate([lease.pages[name], lease.spare[name]]))
            lease.pages[name] = lease.spare[name] = NO_PAGES
            lease.promised[name] = 0


def _least(layout: Layout, columns: int) -> int:
    """Granules that `columns` columns of an empty pool use: the first ones, side by side."""
    return sum(planes.count * layout.span(planes, columns - 1)[1] for planes in layout.planes) if columns else 0
