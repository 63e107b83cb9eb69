"""The honest question: how long does a machine need for a trace if it may not kill requests?

First come, first served: a request waits at the head of the queue until its prompt and its generation fit, runs for
prompt + gen ticks, and holds its memory until the end. Reported: when the last request ends, and the requests that could
never run. A request the allocator can never place is dropped, and so is one it cannot place while nothing else runs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
        arrival = waiting[head].arrival if head < len(waiting) else None
        if arrival is not None and arrival > tick and (not running or arrival < running[0][0]):
            tick = arrival
        elif running and (arrival is None or arrival > tick or running[0][0] <= tick or tick < running[0][0]):
            tick = max(tick, running[0][0])
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
    """The ideal: one budget, no granule, no kind; a request takes exactly its bytes."""

    def __init__(self, geometry: Geometry, total_bytes: int) -> None:
        self._geometry = geometry
        self._total_bytes = self._free_bytes = total_bytes

    def start(self, request: Request, tick: int) -> bool | None:
        """See Server."""
        size_bytes = self._geometry.request_bytes(request.prompt + request.gen)
        if size_bytes > self._total_bytes:
            return None
        if size_bytes > self._free_bytes:
            return False
        self._free_bytes -= size_bytes
        return True

    def end(self, request: Request) -> None:
        """See Server."""
        self._free_bytes += self._geometry.request_bytes(request.prompt + request.gen)


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
