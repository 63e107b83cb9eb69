"""A trace through a cache with segments, and the columns of its row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_hybrid.core.segments import segment_costs
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.sim.latency import H100, CostModel
from sglang_hybrid.sim.metrics import cost_columns, hit_columns
from sglang_hybrid.sim.replay import Ints, Replay
from sglang_hybrid.sim.saving import Saving
from sglang_hybrid.sim.segments.cache import Memory, SegmentCache, Served, blocks_of, identity, prompt_of
from sglang_hybrid.sim.segments.orders import knowing
from sglang_hybrid.sim.trace import Segment, Tokens, Trace

ENDLESS = 1 << 60  # bytes


def play(
    trace: Trace, cache: SegmentCache, capacity_bytes: int, timer: Callable[[], float] = time.perf_counter
) -> tuple[Replay, list[Served]]:
    """Run `trace` through `cache`, prefixes and segments together in `capacity_bytes`; `timer` as for `replay`."""
    served, used, seconds = list[Served](), np.zeros(len(trace), np.int64), np.zeros(len(trace))
    for number, request in enumerate(trace.requests):
        start = timer()
        served.append(cache.serve(request))
        seconds[number] = timer() - start
        used[number] = cache.used_bytes() + cache.segment_bytes()
    skipped = np.array([each.hit_tokens + each.reused_tokens for each in served], np.int64)
    return Replay(trace, capacity_bytes, skipped, used, np.zeros(len(trace)), seconds), served


def columns(
    result: Replay, served: list[Served], cache: SegmentCache, seen: Ints, cost: CostModel = H100
) -> dict[str, Any]:
    """Columns as of a policy without segments, and those of segments; `seen`: tokens of inputs that came before."""
    run = np.array([each.run_tokens for each in served], np.int64), np.array([each.flops for each in served])
    counts, memory = cache.index.counts, cache.memory
    marked, kept = sum(each.marked for each in served), sum(each.kept for each in served)
    prefix = np.array([each.hit_tokens for each in served], np.int64)
    asked = sum(1 for each in served if each.marked)
    return {
        **hit_columns(result.n_input, result.hit_tokens, cache.model, cost, run),
        **cost_columns(result),
        "false_hits": int((prefix > seen).sum()),
        "prefix_tokens": int(prefix.sum()),
        "segment_tokens": sum(each.reused_tokens for each in served),
        "marking_requests": asked,
        "segments_marked": round(marked / max(1, asked), 4),
        "segments_kept": round(kept / max(1, asked), 4),
        "segments_gb": memory.total_bytes / 1e9,
        "segment_dtype": memory.dtype,
        "seam_tokens": memory.seam_tokens,
        "pass_tokens": memory.pass_tokens,
        "transitions_kept": memory.kept,
        "entries": len(cache.index),
        **{f"entries_{name}": getattr(counts, name) for name in ("made", "evicted", "refused")},
    }


def endless(trace: Trace, model: ModelSpec, memory: Memory, policy: str, saving: Saving | None = None) -> SegmentCache:
    """A cache that evicts nothing of `trace`."""
    costs = segment_costs(model, memory.dtype)
    known: dict[Any, int] = {}
    for request in trace.requests:
        for each in request.segments:
            known[_name(request.tokens, each)] = each.end - each.start
    empty = blocks_of(costs, 0)
    blocks = empty.filled(len(known), sum(known.values()), costs.transitions * len(known))
    blocks += empty.filled(1, 1, costs.transitions)  # a new entry has all of its transitions for a while
    return SegmentCache(model, ENDLESS, replace(memory, total_bytes=blocks * costs.block_bytes), policy, saving=saving)


def clairvoyant(
    trace: Trace, model: ModelSpec, capacity_bytes: int, memory: Memory, policy: str, saving: Saving | None = None
) -> SegmentCache:
    """A cache whose order of eviction of segments knows all later requests."""
    seams = Seams(memory.seam_tokens, segment_costs(model, memory.dtype).window)
    uses: dict[bytes, list[float]] = {}
    for request in trace.requests:
        for each in prompt_of(request, seams, identity(seams)).segments:
            uses.setdefault(each.key, []).append(request.ts)
    return SegmentCache(model, capacity_bytes, memory, policy, knowing(uses), saving)


def _name(tokens: Tokens, each: Segment) -> Any:
    return (each.name, each.end - each.start) if each.name >= 0 else tokens[each.start : each.end].tobytes()
