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

from sglang_hybrid.memory.study.geometry import KV, STATE, Geometry
from sglang_hybrid.memory.study.published import TwoStores
from sglang_hybrid.memory.study.store import Pages
from sglang_hybrid.memory.study.workloads import Request


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
        if self._geometry.request_bytes(request.prompt + request.gen) > self._total_bytes:
            return None
        together = [*self._running.values(), (tick, request)]
        if self._lockstep:
            fits = self._peak_bytes(together) <= self._total_bytes
        else:
            whole = sum(self._geometry.request_bytes(other.prompt + other.gen) for _, other in together)
            fits = whole <= self._total_bytes
        if fits:
            self._running[request.request_id] = (tick, request)
        return fits

    def end(self, request: Request) -> None:
        """See Server."""
        del self._running[request.request_id]

    def _peak_bytes(self, together: list[tuple[int, Request]]) -> int:
        geometry = self._geometry
        start, prompt, gen = np.array([(tick, r.prompt, r.gen) for tick, r in together], dtype=np.int64).T
        end = start + prompt + gen
        at = np.unique(end)[:, None] - 1
        tokens = np.clip(at - start, prompt, prompt + gen)
        pages = np.maximum(1, -(-tokens // geometry.page_tokens))
        each = pages * geometry.kv_layers * geometry.kv_page_bytes + geometry.state_layers * geometry.state_block_bytes
        return int(np.where(end > at, each, 0).sum(axis=1).max())


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
