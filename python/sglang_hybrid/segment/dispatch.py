"""Which server computes which cold segment of a prompt: segment parallelism, HYPIC, section 4.4.

A segment is computed from its own tokens alone, so the cold ones of a prompt can be computed at several servers at
once. The paper assigns the longest first, each to the server with the fewest tokens. Here servers have other work, the
way back takes time, and some have what another lacks: each segment goes to where it is there the soonest.
"""

from __future__ import annotations

from collections.abc import Sequence

GAIN = 0.9
"""Of the time that worker 0 takes alone: what is no sooner than that is not worth it."""


def assign(costs: Sequence[Sequence[float]], waits: Sequence[float]) -> list[int]:
    """The worker of each segment, so that the last one is there early.

    `costs[w][s]` is what segment s takes worker w, `waits[w]` what stands before it there. Longest processing time
    first: the segment that takes worker 0 longest goes first, to the worker that is done with it first; of equals to
    the one named first.
    """
    done = list(waits)
    found = [0] * len(costs[0])
    for segment in sorted(range(len(found)), key=lambda segment: -costs[0][segment]):
        worker = min(range(len(done)), key=lambda worker: done[worker] + costs[worker][segment])
        done[worker] += costs[worker][segment]
        found[segment] = worker
    return found


def makespan(costs: Sequence[Sequence[float]], waits: Sequence[float], assigned: Sequence[int]) -> float:
    """When the last segment is there."""
    done = list(waits)
    for segment, worker in enumerate(assigned):
        done[worker] += costs[worker][segment]
    return max((done[worker] for worker in assigned), default=0.0)


def shared_out(costs: Sequence[Sequence[float]], waits: Sequence[float]) -> tuple[list[int], float] | None:
    """The worker of each segment and when all are there; None where worker 0, whose prompt it is, does as well alone.

    The prompt joins the queue of worker 0 once its segments are there. Behind it as much has come as stands before it
    now, so what waits there counts once more, and most for a share of its own. Where that is more than all segments
    take, others compute them if only they are no slower: that takes work from a worker that has too much.
    """
    queue, work = waits[0], sum(costs[0])
    ways = [assign(costs, waits)]
    if len(waits) > 1:
        ways.append([1 + worker for worker in assign(costs[1:], waits[1:])])
    times = [makespan(costs, waits, way) for way in ways]
    best = min(range(len(ways)), key=times.__getitem__)
    way, seconds = ways[best], times[best]
    if not any(way):
        return None
    relieved = queue > work and all(way) and seconds <= work
    return (way, seconds) if relieved or seconds + queue <= GAIN * (queue + work) else None
