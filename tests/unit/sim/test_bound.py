"""The bound holds for everything that is possible: for the optimum, found by trying all, and for every policy."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.spec import ModelSpec, preset
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.sim.bound import SpaceTimeBound
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.ceilings import Clairvoyant, unbounded_hits
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.trace import Trace, make_request, make_trace

ROUNDING = 1e-9  # tokens

Place = tuple[int, ...]  # a position, by all tokens before it


def model_of(kv_bytes: int, state_bytes: int) -> ModelSpec:
    return replace(
        preset("marconi-7b"),
        name=f"{kv_bytes}-{state_bytes}",
        kv_bytes_per_token=kv_bytes,
        checkpoint_bytes=state_bytes,
        conv_bytes=0,
    )


def most_possible(trace: Trace, capacity: int, model: ModelSpec) -> int:
    """Tokens that a cache which knows everything and saves what it likes can skip, by trying every way to resume.

    A request that resumes at a position needs each token of KV before it since the last request that had that token,
    and the state there since the last that had the position. Between two requests what is needed must fit.
    """
    rows = [tuple(r.tokens.tolist()) for r in trace.requests]

    def before(j: int, place: Place) -> int:
        return max((i for i in range(j) if rows[i][: len(place)] == place), default=-1)

    choices = []  # per request and position: tokens, and what is held in which gaps
    for j, r in enumerate(trace.requests):
        ways: list[tuple[int, set[tuple[int, str, Place]]]] = [(0, set())]
        for position in range(1, r.n_input):
            place = rows[j][:position]
            if before(j, place) < 0:
                break
            held = {
                (gap, "kv", place[:at])
                for at in range(1, position + 1)
                for gap in range(before(j, place[:at]), j)
            }  # fmt: skip
            held |= {(gap, "state", place) for gap in range(before(j, place), j)}
            ways.append((position, held))
        choices.append(ways)
    cost = {"kv": model.kv_bytes_per_token, "state": model.checkpoint_bytes}
    best = 0
    for ways in product(*choices):
        tokens = sum(way[0] for way in ways)
        if tokens > best:
            used = [0] * len(rows)
            for gap, kind, _ in set().union(*(way[1] for way in ways)):
                used[gap] += cost[kind]
            best = tokens if max(used) <= capacity else best
    return best


def trace_of(rows: list[tuple[list[int], list[int], int]]) -> Trace:
    """Inputs, outputs and seconds since the request before."""
    times = np.cumsum([seconds for _, _, seconds in rows])
    requests = [make_request(i, o, float(t), str(n)) for n, ((i, o, _), t) in enumerate(zip(rows, times, strict=True))]
    return make_trace("t", requests)


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.lists(st.integers(0, 1), max_size=2),
        st.sampled_from([0, 1, 1, 2, 50]),
    ),
    min_size=1,
    max_size=5,
)
ALIKE = [([1] * 5, [], 1)] * 5  # four of these five can skip four tokens


@st.composite
def budgets(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """Costs, zero among them, and a capacity at the edge of what fits, beside it, or anywhere."""
    kv_bytes, state_bytes = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([0, 1, 2, 7]))
    edge = draw(st.integers(0, 3)) * state_bytes + draw(st.integers(0, 9)) * kv_bytes
    capacity = draw(st.sampled_from([edge - 1, edge, edge, edge + 1]) | st.integers(1, 40))
    assume(capacity > 0)
    return model_of(kv_bytes, state_bytes), capacity


@given(ROWS, budgets())
@example(ALIKE, (model_of(0, 2), 2))
@example(ALIKE, (model_of(0, 2), 1))
@example(ALIKE, (model_of(0, 0), 1))
@example(ALIKE, (model_of(1, 2), 3))
@example(ALIKE, (model_of(3, 0), 12))
@settings(max_examples=300)
def test_nothing_that_is_possible_exceeds_the_bound(
    rows: list[tuple[list[int], list[int], int]], budget: tuple[ModelSpec, int]
) -> None:
    model, capacity = budget
    trace = trace_of(rows)
    index = ReuseIndex(trace)
    bound = SpaceTimeBound(index, model).tokens(capacity) + ROUNDING
    most = most_possible(trace, capacity, model)
    assert most <= bound
    assert bound <= unbounded_hits(index).sum() + 2 * ROUNDING
    assert Clairvoyant(index, capacity, model).hits().sum() <= most
    for policy in POLICIES:
        assert replay(trace, open_cache(policy, capacity, model), capacity).hit_tokens.sum() <= most, policy


@pytest.mark.parametrize(
    ("kv_bytes", "state_bytes", "capacity", "tokens"),
    [
        (0, 2, 2, 16),  # exactly one state, and KV costs nothing
        (0, 2, 1, 0),
        (0, 0, 1, 16),
        (1, 2, 6, 16),  # exactly one state behind four tokens
        (1, 2, 5, 12),
        (1, 2, 2, 0),
        (1, 0, 3, 12),
    ],
)
def test_the_bound_is_exact_for_one_prompt(kv_bytes: int, state_bytes: int, capacity: int, tokens: int) -> None:
    trace, model = trace_of(ALIKE), model_of(kv_bytes, state_bytes)
    assert most_possible(trace, capacity, model) == tokens
    assert SpaceTimeBound(ReuseIndex(trace), model).tokens(capacity) == pytest.approx(tokens, abs=1e-6)
