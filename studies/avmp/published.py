"""The five allocators of the AVMP evaluation, with the released behaviour (AVMP 4.1, baseline fidelity).

On a shortage each drops every page of the request that has not allocated for longest, *although it is running*, tries
again, and reports an out-of-memory event if that was not enough. `killed` counts what the paper's metric does not: the
requests that lost pages.
"""

from collections import Counter
from typing import Protocol

import numpy as np

from avmp.geometry import KV, SLAB_ALIGNMENT_BYTES, STATE, Geometry, align_up
from avmp.handles import Handles, HandleTable
from avmp.pressure import AvmpConfig, PressureMonitor
from avmp.recency import Recency
from avmp.store import TailStore
from avmp.workloads import Request
from sglang_hybrid.core.errors import ConfigError


class Allocator(Protocol):
    """What the replay drives. `arrive` and `grow` return how many calls failed (the paper's OOM events)."""

    killed: set[int]
    counters: Counter[str]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory reserved for the whole run."""
        ...

    def arrive(self, request: Request) -> int:
        """Allocate the prompt's KV pages and the states of `request`."""
        ...

    def grow(self, request: Request, tick: int) -> int:
        """Allocate one more KV page per attention layer."""
        ...

    def depart(self, request: Request) -> None:
        """Free what `request` still holds."""
        ...


class PerLayer:
    """The released runner's calls: one allocation per layer, a failed layer is skipped and the request goes on."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.killed: set[int] = set()
        self.counters: Counter[str] = Counter()

    def allocate(self, kind: int, request_id: int, count: int) -> bool:
        """Give `request_id` `count` units of `kind`, or return False."""
        raise NotImplementedError

    def arrive(self, request: Request) -> int:
        """See Allocator."""
        pages = self.geometry.pages(request.prompt)
        failed = sum(not self.allocate(KV, request.request_id, pages) for _ in range(self.geometry.kv_layers))
        return failed + sum(not self.allocate(STATE, request.request_id, 1) for _ in range(self.geometry.state_layers))

    def grow(self, request: Request, tick: int) -> int:
        """See Allocator."""
        return sum(not self.allocate(KV, request.request_id, 1) for _ in range(self.geometry.kv_layers))


class TwoStores(PerLayer):
    """Fixed dual pools, AVMP static and AVMP dynamic: two stores, and a migration between them if `avmp` is given.

    `scan_evictions` charges the released fixed_dual's search of every handle at each eviction to the counter `visited`.
    """

    def __init__(
        self,
        geometry: Geometry,
        total_bytes: int,
        state_fraction: float,
        avmp: AvmpConfig | None = None,
        oversized: bool = False,
        scan_evictions: bool = False,
    ) -> None:
        super().__init__(geometry)
        if not 0.0 < state_fraction < 1.0:
            raise ConfigError(f"the state share of the memory must lie between 0 and 1: {state_fraction}")
        state_bytes = int(total_bytes * state_fraction)
        share_bytes = (total_bytes - state_bytes, state_bytes)
        self.unit_bytes = tuple(align_up(geometry.unit_bytes(kind), SLAB_ALIGNMENT_BYTES) for kind in (KV, STATE))
        self._slab_bytes = [total_bytes if oversized else share for share in share_bytes]
        self.stores = [
            TailStore(slab // unit, share // unit)
            for slab, share, unit in zip(self._slab_bytes, share_bytes, self.unit_bytes, strict=True)
        ]
        self.tables = [HandleTable(kind, self.unit_bytes[kind]) for kind in (KV, STATE)]
        self.recency = [Recency(), Recency()]
        self.monitor = PressureMonitor(avmp) if avmp else None
        self._held: dict[int, list[list[Handles]]] = {}
        self._scan_evictions = scan_evictions

    @property
    def reserved_bytes(self) -> int:
        """See Allocator; AVMP reserves the whole budget twice."""
        return sum(self._slab_bytes)

    def allocate(self, kind: int, request_id: int, count: int) -> bool:
        """Take, else evict one request and take, else migrate and take (AVMP 3.2's handler); False if all fail."""
        pages = self.stores[kind].take(count)
        if pages is None:
            self._evict(kind)
            pages = self.stores[kind].take(count)
        if pages is None and self.monitor and self.migrate(kind):
            pages = self.stores[kind].take(count)
        if pages is None:
            return False
        handles = self.tables[kind].mint(pages)
        self.recency[kind].touch(request_id, handles)
        self._held.setdefault(request_id, [[], []])[kind].append(handles)
        self._observe()
        return True

    def depart(self, request: Request) -> None:
        """See Allocator."""
        for kind, given in enumerate(self._held.pop(request.request_id, [[], []])):
            table = self.tables[kind]
            live = table.live(np.concatenate(given)) if given else None
            if live is not None and len(live):
                self.counters["visited"] += len(table)
                self.stores[kind].give(table.remove(live))
                self.recency[kind].drop(request.request_id)
        self._observe()

    def migrate(self, recipient: int) -> bool:
        """Move one batch of the other pool's units to `recipient`; all or nothing, with rollback (AVMP 3.2)."""
        assert self.monitor is not None
        donor = 1 - recipient
        if not self.monitor.start(self.stores[donor].free_fraction):
            return False
        units = self.monitor.config.batch_units
        moved_bytes = units * self.unit_bytes[donor]
        gained, waste_bytes = divmod(moved_bytes, self.unit_bytes[recipient])
        done = self.stores[donor].resize(self.stores[donor].capacity - units)
        if done and not self.stores[recipient].resize(self.stores[recipient].capacity + gained):
            self.stores[donor].resize(self.stores[donor].capacity + units)
            done = False
        if done:
            self.counters.update(rebalances=1, migrated_bytes=moved_bytes, wasted_bytes=waste_bytes)
        self._observe()
        return done

    def check(self) -> None:
        """Raise InvariantError unless both stores and both tables agree with themselves."""
        for store, table in zip(self.stores, self.tables, strict=True):
            store.check()
            table.check()

    def _evict(self, kind: int) -> None:
        if self._scan_evictions:
            self.counters["visited"] += sum(map(len, self.tables))
        victim = self.recency[kind].oldest()
        if victim is not None:
            request_id, handles = victim
            self.killed.add(request_id)
            self.counters["evictions"] += 1
            self.counters["visited"] += len(handles)
            self.stores[kind].give(self.tables[kind].remove(handles))

    def _observe(self) -> None:
        if self.monitor:
            self.monitor.observe(self.stores[KV].free_fraction, self.stores[STATE].free_fraction)
