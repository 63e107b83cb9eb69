"""The honest question: how long does a machine need for a trace if it may not kill requests?

First come, first served: a request waits at the head of the queue until its prompt and its generation fit, runs for
prompt + gen ticks, and holds its memory until the end. Reported: when the last request ends, and the requests that
could never run. A request the allocator can never place is dropped, and so is one it cannot place while nothing else
runs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from avmp.geometry import KV, STATE, Geometry
from avmp.published import TwoStores
from avmp.store import Pages
from avmp.workloads import Request
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.memory.layout import Layout


class Server(Protocol):
    """Memory that admits whole requests."""

    def start(self, request: Request, tick: int) -> bool | None:
        """True: it runs. False: it must wait. None: it can never run."""
        ...

    def end(self, request: Request) -> None:
        """Free a running request's memory."""
        ...


@dataclass(frozen=True)
class Service:
    """What a queue run produced: ticks until the last end, tokens of the requests served, and who was dropped."""

    makespan: int
    served: int
    dropped: int
    tokens: int

    @property
    def tokens_per_tick(self) -> float:
        """Throughput."""
        return self.tokens / self.makespan if self.makespan else 0.0


def serve(server: Server, requests: Sequence[Request]) -> Service:
    """Run `requests` (by arrival; request ids are their positions) through `server`."""
    waiting = sorted(requests, key=lambda request: (request.arrival, request.request_id))
    running: list[tuple[int, int]] = []
    tick = last = dropped = tokens = head = 0
    while head < len(waiting) or running:
        coming = [running[0][0]] if running else []
        if head < len(waiting) and (waiting[head].arrival > tick or not running):
            coming.append(waiting[head].arrival)
        tick = max(tick, min(coming))
        while running and running[0][0] <= tick:
            server.end(requests[heapq.heappop(running)[1]])
        last = tick
        while head < len(waiting) and waiting[head].arrival <= tick:
            request = waiting[head]
            started = server.start(request, tick)
            if started:
                heapq.heappush(running, (tick + request.prompt + request.gen, request.request_id))
                tokens += request.prompt + request.gen
            elif started is None or not running:
                dropped += 1
            else:
                break
            head += 1
    return Service(last, len(waiting) - dropped, dropped, tokens)


class ByteGranular:
    """The ideal: one budget, no granule, no kind; a request takes exactly its bytes.

    With `lockstep` it need not set a request's last byte aside from the start: requests grow by one token per tick, and
    the head is admitted if what all of them hold never exceeds the budget until each has ended.
    """

    def __init__(self, geometry: Geometry, total_bytes: int, lockstep: bool = False) -> None:
        self._geometry = geometry
        self._total_bytes = total_bytes
        self._lockstep = lockstep
        self._running: dict[int, tuple[int, Request]] = {}

    def start(self, request: Request, tick: int) -> bool | None:
        """See Server."""
        whole = self._geometry.pages(request.prompt + request.gen)
        if self._held_bytes(np.array([whole]), np.array([1]))[0] > self._total_bytes:
            return None
        together = [*self._running.values(), (tick, request)]
        fits = self._most_bytes(together) <= self._total_bytes
        if fits:
            self._running[request.request_id] = (tick, request)
        return fits

    def end(self, request: Request) -> None:
        """See Server."""
        del self._running[request.request_id]

    def _held_bytes(self, pages: Pages, states: Pages) -> Pages:
        """Bytes under `pages` KV pages (each of every attention layer) and `states` whole states."""
        geometry = self._geometry
        page_bytes = geometry.kv_layers * geometry.kv_page_bytes
        return pages * page_bytes + states * (geometry.state_layers * geometry.state_block_bytes)

    def _most_bytes(self, together: list[tuple[int, Request]]) -> int:
        """Most bytes that `together` will hold at any tick, from now on and until each has ended."""
        start, prompt, gen = np.array([(tick, r.prompt, r.gen) for tick, r in together], dtype=np.int64).T
        end = start + prompt + gen
        if self._lockstep:
            at = np.unique(end)[:, None] - 1  # between two ends usage only rises: it peaks just before an end
            tokens = np.clip(at - start, prompt, prompt + gen)
        else:
            at = np.array([[-1]])
            tokens = (prompt + gen)[None]
        pages = np.maximum(1, -(-tokens // self._geometry.page_tokens))
        running = end > at
        return int(self._held_bytes(np.where(running, pages, 0).sum(axis=1), running.sum(axis=1)).max())


class ColumnGranular(ByteGranular):
    """The ideal at a granule: as ByteGranular, but memory comes in whole columns of `layouts` (KV, states).

    A bound for every placement in these layouts: n live pages touch at least ceil(n / column_pages) columns, reached
    only if pages could be moved for nothing whenever one ends. Raises ConfigError unless columns are exclusive.
    """

    def __init__(self, geometry: Geometry, total_bytes: int, layouts: Sequence[Layout], lockstep: bool = False) -> None:
        super().__init__(geometry, total_bytes, lockstep)
        if not all(layout.exclusive for layout in layouts):
            raise ConfigError(f"choose layouts whose columns share no granule: {[layout.name for layout in layouts]}")
        self._columns = [(each.column_pages, each.column_granules * each.granule_bytes) for each in layouts]

    def _held_bytes(self, pages: Pages, states: Pages) -> Pages:
        held = np.zeros_like(pages)
        for count, (column_pages, column_bytes) in zip((pages, states), self._columns, strict=True):
            held += -(-count // column_pages) * column_bytes
        return held


class StoresServer:
    """Static or AVMP stores without their evictions: on a shortage they may migrate, once per attempt, then wait.

    While nothing runs AVMP tries until a migration fails, the kindest reading of its rule.
    """

    def __init__(self, stores: TwoStores) -> None:
        self._stores = stores
        self._held: dict[int, list[Pages]] = {}

    def start(self, request: Request, tick: int) -> bool | None:
        """See Server."""
        geometry, stores = self._stores.geometry, self._stores.stores
        need = (geometry.pages(request.prompt + request.gen) * geometry.kv_layers, geometry.state_layers)
        if self._stores.monitor is None and any(count > stores[kind].limit for kind, count in enumerate(need)):
            return None
        while True:
            lacking = [kind for kind in (KV, STATE) if stores[kind].free_pages < need[kind]]
            if not lacking:
                taken = [stores[kind].take(need[kind]) for kind in (KV, STATE)]
                self._held[request.request_id] = [pages for pages in taken if pages is not None]
                return True
            if self._stores.monitor is None or not self._stores.migrate(lacking[0]):
                return False
            if self._held and any(stores[kind].free_pages < need[kind] for kind in (KV, STATE)):
                return False

    def end(self, request: Request) -> None:
        """See Server."""
        for store, pages in zip(self._stores.stores, self._held.pop(request.request_id), strict=True):
            store.give(pages)
