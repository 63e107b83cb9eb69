"""Replay a trace through an allocator; count the paper's out-of-memory events and what became of the requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from avmp.geometry import Geometry
from avmp.published import Allocator
from avmp.workloads import Request

_DEPART, _GROW, _ARRIVE = range(3)
_SAMPLE_EVENTS = 100


@dataclass(frozen=True)
class Outcome:
    """What one replay produced.

    `oom` is the paper's N_OOM: failing calls. `completed` is the paper's: no failing call. `killed` requests lost pages
    while they ran. `intact` requests had neither, that is, they could have produced an answer.
    """

    requests: int
    oom: int
    completed: int
    killed: int
    intact: int
    batch_p50: float
    rebalances: int
    migrated_bytes: int
    visited: int
    reserved_bytes: int


def events(requests: Sequence[Request], geometry: Geometry) -> list[tuple[int, int, int]]:
    """(tick, what, request) in the released order: departures, then growth, then arrivals; ties by request."""
    out = []
    for request in requests:
        out.append((request.arrival, _ARRIVE, request.request_id))
        out.append((request.departure, _DEPART, request.request_id))
        first = geometry.pages(request.prompt) * geometry.page_tokens + 1
        for total in range(first, request.prompt + request.gen + 1, geometry.page_tokens):
            out.append((request.arrival + total, _GROW, request.request_id))
    out.sort()
    return out


def replay(allocator: Allocator, requests: Sequence[Request], geometry: Geometry) -> Outcome:
    """Drive `allocator` through the trace `requests` and report; request ids must be their positions."""
    running: set[int] = set()
    failed: set[int] = set()
    oom = 0
    samples = []
    for index, (tick, what, request_id) in enumerate(events(requests, geometry), start=1):
        request = requests[request_id]
        errors = 0
        if what == _ARRIVE:
            errors = allocator.arrive(request)
            running.add(request_id)
        elif what == _GROW and request_id in running:
            errors = allocator.grow(request, tick)
        elif what == _DEPART:
            allocator.depart(request)
            running.remove(request_id)
        if errors:
            oom += errors
            failed.add(request_id)
        if index % _SAMPLE_EVENTS == 0 and running:
            samples.append(len(running))
    return Outcome(
        requests=len(requests),
        oom=oom,
        completed=len(requests) - len(failed),
        killed=len(allocator.killed),
        intact=len(requests) - len(failed | allocator.killed),
        batch_p50=float(np.median(samples)) if samples else 0.0,
        rebalances=allocator.counters["rebalances"],
        migrated_bytes=allocator.counters["migrated_bytes"],
        visited=allocator.counters["visited"],
        reserved_bytes=allocator.reserved_bytes,
    )
