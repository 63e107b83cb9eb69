"""The ceilings: exact on traces small enough to enumerate, ordered, and never above what is possible."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim.bound import SpaceTimeBound
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.ceilings import Clairvoyant, unbounded_hits
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.trace import Trace, TraceRequest, make_request, make_trace
from sglang_hybrid.sim.workloads import generate

MODEL = preset("marconi-7b")
ATTENTION = replace(MODEL, name="attention", checkpoint_bytes=0, conv_bytes=0)
TINY = replace(MODEL, name="tiny", kv_bytes_per_token=1, checkpoint_bytes=2, conv_bytes=0)


def trace_of(*rows: tuple[float, list[int], list[int]]) -> Trace:
    return make_trace("t", [make_request(i, o, ts, str(n)) for n, (ts, i, o) in enumerate(rows)])


def longest_seen(trace: Trace) -> list[int]:
    """The definition, in quadratic time."""
    found = []
    for j, r in enumerate(trace.requests):
        best = 0
        for earlier in trace.requests[:j]:
            n = min(len(earlier.tokens), r.n_input - 1)
            different = np.flatnonzero(earlier.tokens[:n] != r.tokens[:n])
            best = max(best, int(different[0]) if len(different) else n)
        found.append(best)
    return found


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.lists(st.integers(0, 1), max_size=3)),
    min_size=1,
    max_size=14,
)


@given(requests)
@settings(max_examples=150)
def test_the_index_equals_the_definition(rows: list[tuple[list[int], list[int]]]) -> None:
    trace = trace_of(*((float(t), i, o) for t, (i, o) in enumerate(rows)))
    index = ReuseIndex(trace)
    index.check()
    assert index.seen_tokens.tolist() == longest_seen(trace)
    for path, r in zip(index.paths, trace.requests, strict=True):
        assert index.depth[path[-1]] == len(r.tokens)
        assert (np.diff(index.depth[path]) > 0).all()


@given(requests, st.integers(3, 25), st.sampled_from([TINY, replace(TINY, checkpoint_bytes=0)]))
@settings(max_examples=60)
def test_no_cache_beats_the_bound(rows: list[tuple[list[int], list[int]]], capacity: int, model: object) -> None:
    trace = trace_of(*((float(t * t % 7 + 3 * t), i, o) for t, (i, o) in enumerate(rows)))
    index = ReuseIndex(trace)
    bound = SpaceTimeBound(index, model).tokens(capacity)  # type: ignore[arg-type]
    assert bound <= unbounded_hits(index).sum() + 1e-6
    seer = Clairvoyant(index, capacity, model)  # type: ignore[arg-type]
    hits = seer.hits()
    seer.check()
    assert (hits <= index.seen_tokens).all()
    assert hits.sum() <= bound + 1e-6
    for policy in ("lru", "forecast"):
        result = replay(trace, open_cache(policy, capacity, model), capacity)  # type: ignore[arg-type]
        result.check()
        assert result.hit_tokens.sum() <= bound + 1e-6


def test_the_bound_is_exact_where_one_interval_fits() -> None:
    """Two conversations return at the same time; room for one: the longer one is worth keeping."""
    rows = ((0.0, [1] * 10, []), (0.0, [2] * 6, []), (10.0, [1] * 11, []), (10.0, [2] * 7, []))
    index = ReuseIndex(trace_of(*rows))
    assert SpaceTimeBound(index, TINY).tokens(12) == pytest.approx(10.0, abs=2.5)
    assert Clairvoyant(index, 12, TINY).hits().sum() == 10
    assert SpaceTimeBound(index, TINY).tokens(20) == pytest.approx(16.0)
    assert Clairvoyant(index, 20, TINY).hits().sum() == 16


def test_time_can_be_shared_but_only_in_turn() -> None:
    """The same bytes serve two conversations one after the other; a bound over the whole trace knows it too."""
    rows = ((0.0, [1] * 10, []), (5.0, [1] * 11, []), (5.0, [2] * 10, []), (10.0, [2] * 11, []))
    index = ReuseIndex(trace_of(*rows))
    assert Clairvoyant(index, 12, TINY).hits().sum() == 20


@pytest.mark.parametrize("name", ["sharegpt", "swebench", "fewshot"])
@pytest.mark.parametrize("model", [MODEL, ATTENTION], ids=lambda m: m.name)
def test_rows_are_ordered_on_real_sizes(name: str, model: object) -> None:
    trace = generate(name, 5, **({"requests": 300} if name == "fewshot" else {"sessions": 20}))
    index = ReuseIndex(trace)
    bound = SpaceTimeBound(index, model)  # type: ignore[arg-type]
    last = 0.0
    for gb in (0.5, 1.0, 4.0, 64.0):
        seer = Clairvoyant(index, int(gb * 1e9), model)  # type: ignore[arg-type]
        got, most = float(seer.hits().sum()), bound.tokens(int(gb * 1e9))
        seer.check()
        assert last <= got + 0.02 * index.seen_tokens.sum()
        assert got <= most + 1e-6
        last = got
    assert last == index.seen_tokens.sum() == round(most)


def test_no_reuse_no_tokens() -> None:
    index = ReuseIndex(trace_of((0.0, [1, 2], [3]), (1.0, [4, 5], [6])))
    assert SpaceTimeBound(index, TINY).tokens(100) == 0.0
    assert Clairvoyant(index, 100, TINY).hits().sum() == 0


def test_a_simultaneous_trace_costs_no_space_time() -> None:
    rows = [(0.0, [1, 2, 3, 4], [])] * 3
    index = ReuseIndex(trace_of(*rows))
    assert SpaceTimeBound(index, TINY).tokens(5) == pytest.approx(6.0)


def test_check_finds_a_wrong_byte_count() -> None:
    trace = Trace("t", (TraceRequest(np.array([1, 2, 3], dtype=np.int32), 2, 0.0, "s"),))
    seer = Clairvoyant(ReuseIndex(trace), 10, TINY)
    seer.used_bytes = 1
    with pytest.raises(InvariantError, match="bytes are held"):
        seer.check()
