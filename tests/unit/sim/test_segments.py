"""A simulated cache with memory for segments: what it reuses, what that costs, and what it never does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import ModelSpec, preset
from sglang_hybrid.segment.geometry import checked
from sglang_hybrid.sim import grid
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.segments.cache import Memory, SegmentCache, Served
from sglang_hybrid.sim.segments.orders import ByFuture, ByRecency
from sglang_hybrid.sim.segments.play import ENDLESS, clairvoyant, endless, play
from sglang_hybrid.sim.trace import Segment, Trace, TraceRequest, make_trace
from sglang_hybrid.sim.workloads import generate

MODEL = preset("qwen3.5-35b-a3b")
GB = 10**9
SYSTEM, QUESTION = np.arange(20), np.arange(20, 30)
A, B, C = (np.arange(1000 * n, 1000 * n + 200) for n in (1, 2, 3))
SMALL = "workload:documents?seed=3&requests=60&documents=30&per_request=4&document_tokens=400"


def request(*parts: np.ndarray, ts: float = 0.0, answer: Sequence[int] = (7, 8), marked: bool = True) -> TraceRequest:
    """A request whose parts of 200 tokens are segments."""
    tokens = np.concatenate([*parts, np.array(answer)]).astype(np.int32)
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    segments = [Segment(a, b) for a, b in pairwise(ends) if b - a == 200]
    return TraceRequest(tokens, ends[-1], ts, "", segments=tuple(segments) if marked else ())


def a_cache(memory: int = 4 * GB, capacity: int = 4 * GB, model: ModelSpec = MODEL, **kwargs: float) -> SegmentCache:
    return SegmentCache(model, capacity, Memory(memory, **kwargs))  # type: ignore[arg-type]


def served(cache: SegmentCache, *requests: TraceRequest) -> list[Served]:
    found = [cache.serve(each) for each in requests]
    cache.check()
    return found


def test_documents_are_reused_in_another_order_behind_other_text() -> None:
    cache = a_cache()
    first, second = served(cache, request(SYSTEM, A, B, QUESTION), request(B, QUESTION, A, C, QUESTION, ts=1.0))
    jump = cache.costs.jump_flops
    run = MODEL.prefill_flops
    seam = 8
    rows = run(20 + seam) + run(228, 212) + run(430, 412)
    assert first == Served(0, 0, 28 + 16 + 18 + 400, rows + 2 * run(200) + 2 * jump, 2, 0)
    rows = run(seam) + run(210 + seam, 192) + run(418, 402) + run(620, 602)
    assert second == Served(0, 2 * 184, 8 + 26 + 16 + 18 + 200, rows + run(200) + 3 * jump, 3, 2)
    costs = cache.costs
    transitions = costs.transitions * costs.transition_bytes
    transitions += costs.block_bytes - costs.block_transitions * costs.transition_bytes  # the end of each block
    assert cache.segment_bytes() == 3 * (costs.block_bytes + 184 * costs.token_bytes + transitions)


def test_transitions_that_vanish_leave_their_memory_to_others() -> None:
    whole, half = a_cache(), a_cache(kept=0.5)  # one block and a piece of another, and a block
    for cache in (whole, half):
        served(cache, request(SYSTEM, A, B, QUESTION))
    saved = 2 * whole.costs.transitions // 2 * whole.costs.transition_bytes
    assert half.segment_bytes() == whole.segment_bytes() - saved
    assert half.index.usual_transitions == whole.costs.transitions // 2


def test_a_second_turn_over_composed_context_hits() -> None:
    cache = a_cache()
    ask = request(SYSTEM, A, B, QUESTION)
    follow = request(SYSTEM, A, B, QUESTION, np.array([7, 8]), np.arange(50, 60), ts=1.0)
    _, second = served(cache, ask, follow)
    assert second.hit_tokens == 432, "prompt and answer"
    assert (second.run_tokens, second.reused_tokens, second.kept) == (10, 0, 2)


def test_what_is_approximate_serves_nobody_who_marks_nothing() -> None:
    cache = a_cache()
    plain = request(SYSTEM, A, B, QUESTION, ts=1.0, marked=False)
    follow = request(SYSTEM, A, B, QUESTION, np.array([7, 8]), QUESTION, ts=2.0, marked=False)
    found = served(cache, request(SYSTEM, A, B, QUESTION), plain, follow)
    assert [each.hit_tokens for each in found] == [0, 0, 432]
    assert found[1].run_tokens == 430
    composed = served(cache, request(SYSTEM, A, C, QUESTION, ts=3.0))[0]
    assert composed.hit_tokens == 28, "what is exact serves up to the first interior"


def test_the_exact_prefix_comes_first() -> None:
    cache = a_cache()
    plain = [request(SYSTEM, A, np.arange(at, at + 10), ts=float(at), marked=False) for at in (40, 50, 60)]
    served(cache, *plain)  # three that part behind A: a state is saved there
    found = served(cache, request(SYSTEM, A, B, QUESTION, ts=70.0))[0]
    assert found.hit_tokens == 220
    assert (found.marked, found.kept) == (2, 1)
    assert len(cache.index) == 1, "A is no segment here"


def test_without_marks_nothing_changes() -> None:
    trace = generate("sharegpt", 5, sessions=8)
    cache = a_cache(capacity=GB)
    result, found = play(trace, cache, 5 * GB)
    assert [each.hit_tokens for each in found] == replay(
        trace, open_cache("forecast", GB, MODEL), GB
    ).hit_tokens.tolist()
    assert (result.hit_tokens.sum() > 0, len(cache.index)) == (True, 0)


def test_tenants_and_logs_have_names_for_equal_tokens() -> None:
    one, other = (
        replace(request(SYSTEM, A, QUESTION), segments=(Segment(20, 220, name),), ts=float(name)) for name in (1, 2)
    )
    elsewhere = replace(request(QUESTION, B, QUESTION, ts=3.0), segments=(Segment(10, 210, 1),))
    found = served(a_cache(), one, replace(other, tokens=other.tokens + 1), elsewhere)
    assert [each.reused_tokens for each in found] == [0, 0, 184]


def test_nothing_is_skipped_that_did_not_come_before() -> None:
    trace = grid.Source(SMALL).load()
    for cache in (a_cache(), a_cache(memory=GB // 2), SegmentCache(MODEL, GB, Memory(GB // 2), "lru", ByRecency)):
        result, found = play(trace, cache, 8 * GB)
        result.check()
        cache.check()
        seen: set[bytes] = set()
        prefixes: list[np.ndarray] = []
        for asked, its in zip(trace.requests, found, strict=True):
            tokens = asked.input_tokens
            assert its.hit_tokens + its.reused_tokens + its.run_tokens >= asked.n_input
            assert its.hit_tokens == 0 or any((p[: its.hit_tokens] == tokens[: its.hit_tokens]).all() for p in prefixes)
            known = sum(end - start - 16 for start, end, _ in asked.segments if tokens[start:end].tobytes() in seen)
            assert its.reused_tokens <= known
            assert 0 <= its.kept <= its.marked == len(asked.segments)
            seen |= {tokens[start:end].tobytes() for start, end, _ in asked.segments}
            prefixes.append(np.pad(asked.tokens, (0, 1 << 15)))
        assert sum(each.reused_tokens for each in found) > 0


def test_memory_without_end_evicts_nothing_and_saves_most() -> None:
    trace = grid.Source(SMALL).load()
    total = []
    for cache in (
        a_cache(memory=GB // 2),
        clairvoyant(trace, MODEL, 4 * GB, Memory(GB // 2), "forecast"),
        endless(trace, MODEL, Memory(GB // 2), "forecast"),
    ):
        found = play(trace, cache, ENDLESS * 2)[1]
        total.append(sum(each.flops for each in found))
        cache.check()
    assert total[0] > total[1] > total[2]
    assert (cache.index.counts.evicted, cache.index.counts.refused) == (0, 0)
    assert len(cache.index) == len({t.tokens[a:b].tobytes() for t in trace.requests for a, b, _ in t.segments})


def test_orders_to_compare_with() -> None:
    requests = [request(doc, QUESTION, ts=float(ts)) for ts, doc in enumerate((A, B, C, A, B, A))]
    trace = make_trace("t", requests)
    blocks = 5 * a_cache().costs.block_bytes  # two entries: of states and transitions each; one of KV holds both
    recency = SegmentCache(MODEL, GB, Memory(blocks), order=ByRecency)
    assert [each.kept for each in play(trace, recency, 8 * GB)[1]] == [0, 0, 0, 0, 0, 1]
    knows = clairvoyant(trace, MODEL, GB, Memory(blocks), "forecast")
    assert [each.kept for each in play(trace, knows, 8 * GB)[1]] == [0, 0, 0, 1, 1, 1]
    for order in (recency.index._order, knows.index._order):
        entry = next(iter(recency.index))
        assert len(order) == 2
        order.check()
        order.discard(entry)
        assert isinstance(order, ByRecency | ByFuture)
        order._entries[99] = replace(entry, key=b"nobody")
        with pytest.raises(InvariantError):
            order.check()


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"need 0\.099 GB or more.*raise --segments-gb: 0\.05"):
        a_cache(memory=GB // 20)
    with pytest.raises(ConfigError, match="Kimi delta attention or Mamba-2"):
        a_cache(model=preset("llama-3.1-8b"))
    with pytest.raises(ConfigError, match="only the total costs"):
        a_cache(model=preset("marconi-7b"))


@pytest.mark.parametrize(("pass_tokens", "kept"), [(199, 0), (200, 1), (8192, 1)])
def test_a_segment_has_to_fit_into_a_pass(pass_tokens: int, kept: int) -> None:
    cache = a_cache(pass_tokens=pass_tokens)
    found = served(cache, request(SYSTEM, A, QUESTION), request(QUESTION, A, QUESTION, ts=1.0))
    assert [each.kept for each in found] == [0, kept]
    assert found[0].run_tokens == (46 + 200 if kept else 230)


@pytest.mark.parametrize("name", ["documents", "skills"])
def test_generated_segments_are_the_texts_that_come_again(name: str) -> None:
    trace: Trace = generate(name, 2, **({"requests": 30} if name == "documents" else {"sessions": 8}))
    trace.check()
    places: dict[bytes, set[int]] = {}
    for each in trace.requests:
        checked([segment[:2] for segment in each.segments], each.n_input)
        for start, end, _ in each.segments:
            places.setdefault(each.tokens[start:end].tobytes(), set()).add(start)
    assert max(map(len, places.values())) > 3, "at other places"
    turns = [r for r in trace.requests if r.turn]
    assert turns
    for later in turns:
        before = next(r for r in trace.requests if (r.session, r.turn) == (later.session, later.turn - 1))
        assert (later.tokens[: len(before.tokens)] == before.tokens).all(), "a conversation goes on"
        assert later.segments[: len(before.segments)] == before.segments


def test_documents_that_everybody_has_lie_at_the_same_place() -> None:
    trace = generate("documents", 4, requests=20, fixed=2, per_request=3, again=0.0)
    assert {r.turn for r in trace.requests} == {0}
    for n in (0, 1):
        assert len({(r.segments[n], r.tokens[slice(*r.segments[n][:2])].tobytes()) for r in trace.requests}) == 1
    assert len({r.tokens[slice(*r.segments[2][:2])].tobytes() for r in trace.requests}) > 5
    skills = generate("skills", 4, sessions=3, load=0.0, system_tokens=0)
    assert len({r.session for r in skills.requests}) == 3
