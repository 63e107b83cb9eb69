"""Which server computes which cold segment of a prompt: segment parallelism, HYPIC, section 4.4.

A segment is computed from its own tokens alone, so the cold ones of a prompt can be computed at several servers at
once. The paper assigns the longest first, each to the server with the fewest tokens. Here servers have other work, the
way back takes time, and some have what another lacks: each segment goes to where it is there the soonest.
"""

from __future__ import annotations

from collections.abc import Sequence


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
