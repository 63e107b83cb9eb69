"""Granules, slots and reaches that follow from a model and a budget; the meter; clearing a pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError, PoolExhausted
from sglang_hybrid.memory.backing import LedgerBacking, Run
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.layout import Layout, Planes
from sglang_hybrid.memory.meter import MeteredBacking
from sglang_hybrid.memory.sizing import CUDA, HOST, KV, STATE, Kinds, choose


@settings(max_examples=40)
@given(
    row=st.sampled_from([256, 768, 1024, 4096]),
    planes=st.integers(1, 12),
    page=st.sampled_from([1, 16, 64]),
    state_bytes=st.integers(1, 200_000).map(lambda units: 16 * units),
    total_mib=st.integers(4, 24),
    request_states=st.integers(1, 5),
)
def test_a_chosen_size_serves_one_request_and_shares_no_granule(
    row: int, planes: int, page: int, state_bytes: int, total_mib: int, request_states: int
) -> None:
    try:
        sizing = choose(Kinds(row, planes, page, state_bytes), total_mib << 20, HOST, request_states)
    except ConfigError:
        return  # too small; another test looks at what it says
    kv, state = sizing.kv_layout, sizing.state_layout
    assert kv.exclusive
    assert state.exclusive
    assert (kv.column_slots, kv.column_granules) == (sizing.kv_column_tokens, sizing.kv_column_granules)
    assert (state.column_slots, state.column_granules) == (sizing.states_per_column, sizing.state_column_granules)
    assert sizing.state_slot_bytes >= state_bytes
    assert sizing.tokens >= page
    budget = Budget(
        sizing.total_bytes, sizing.granule_bytes, LedgerBacking((*state.plane_granules, *kv.plane_granules))
    )
    states = budget.add_pool(state)
    tokens = budget.add_pool(kv, len(state.plane_granules))
    states.alloc(request_states)
    assert len(tokens.alloc(sizing.tokens // page)) * page == sizing.tokens, "one request can fill the reach"
    budget.check()
    tokens.clear()
    states.clear()
    budget.check()
    assert len(states.alloc(sizing.states)) == sizing.states, "all of the memory but a column of KV can be states"


def test_a_budget_too_small_names_one_that_is_large_enough() -> None:
    kinds = Kinds(256, 2, 1, 1_000_000)
    with pytest.raises(ConfigError, match="does not hold one request") as refused:
        choose(kinds, 2_000_000, HOST, 4)
    needed = int(str(refused.value).split("raise it to ")[1].split(" bytes")[0].replace(",", ""))
    assert choose(kinds, needed + (1 << 20), HOST, 4).tokens > 0


def test_a_model_of_one_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs KV and recurrent states"):
        Kinds(256, 2, 1, 0)


def test_a_granule_wastes_little() -> None:
    sizing = choose(Kinds(1024, 24, 1, 78_000_000), 60 << 30, CUDA, 3)
    assert sizing.granule_bytes % (2 << 20) == 0
    assert sizing.state_slot_bytes / 78_000_000 < 1.03
    assert (sizing.kv_layout.name, sizing.state_layout.name) == (KV, STATE)


@pytest.mark.parametrize("gigabytes", [8, 60])
def test_a_second_tier_as_large_as_the_budget_is_no_larger(gigabytes: int) -> None:
    sizing = choose(Kinds(1024, 24, 1, 78_000_000), gigabytes << 30, CUDA, 3)
    kv_bytes = sizing.host_tokens * sizing.kinds.token_bytes
    state_bytes = sizing.host_states * sizing.kinds.state_bytes
    assert 0.75 * sizing.total_bytes < kv_bytes + state_bytes <= sizing.total_bytes
    assert state_bytes / kv_bytes == pytest.approx(0.9, rel=0.25), "SGLang's ratio"


def test_clear_takes_back_all_but_the_pinned_pages() -> None:
    layout = Layout("kv", (Planes("k", 2, 256),), 64, 1024, page_slots=2, pinned_pages=1)
    budget = Budget(64 << 10, 1024, LedgerBacking(layout.plane_granules))
    pool = budget.add_pool(layout)
    kept = pool.alloc(20)
    pool.free(kept[3:7])
    pool.clear()
    budget.check()
    assert pool.live_pages == 1
    assert pool.room == layout.column_pages - 1, "only the column of the pinned page is in use"
    assert 0 not in pool.alloc(31)


def test_the_meter_counts_what_happened_and_what_failed() -> None:
    times = iter(np.arange(0.0, 8.0, 0.25))
    turns = iter(np.arange(0.0, 1.0, 0.125))
    meter = MeteredBacking(LedgerBacking([8], capacity=4), lambda: float(next(times)), lambda: float(next(turns)))
    meter.map([Run(0, 0, 3)])
    with pytest.raises(PoolExhausted):
        meter.map([Run(0, 3, 3)])
    meter.unmap([Run(0, 1, 2)])
    assert (meter.mapped.calls, meter.mapped.granules, meter.mapped.failed) == (1, 3, 1)
    assert (meter.unmapped.calls, meter.unmapped.granules, meter.unmapped.total_s) == (1, 2, 0.25)
    assert (meter.mapped.quantile(0.99), meter.mapped.processor_quantile(0.99)) == (0.25, 0.125)
    assert meter.trim(0) == 0
