"""The published allocators, number for number: out-of-memory events per cell as committed with the AVMP release."""

import pytest

from avmp.geometry import GEOMETRIES, KV, STATE, Geometry, align_up
from avmp.padded import PaddedUnified
from avmp.pressure import AvmpConfig, Pressure, PressureMonitor
from avmp.published import TwoStores
from avmp.replay import replay
from avmp.store import TailStore
from avmp.workloads import generate
from sglang_hybrid.core.errors import ConfigError, InvariantError

JAMBA, MAMBA2 = GEOMETRIES["jamba_1_5_mini"], GEOMETRIES["mamba2_1b3"]
GIB = 1 << 30


def dynamic(geometry, total_bytes, config=None):
    return TwoStores(geometry, total_bytes, 0.5, config or AvmpConfig(), oversized=True)


def mean_oom(make, workload, geometry, gib):
    outcomes = [replay(make(geometry, gib * GIB), generate(workload, index), geometry) for index in range(3)]
    return round(sum(outcome.oom for outcome in outcomes) / 3, 2)


@pytest.mark.parametrize(
    ("make", "workload", "geometry", "gib", "published"),
    [
        (PaddedUnified, "mixed_long", MAMBA2, 1, 221.0),
        (lambda g, t: TwoStores(g, t, 0.5), "mixed_long", JAMBA, 4, 92.0),
        (lambda g, t: TwoStores(g, t, 0.5), "agentic_burst", JAMBA, 1, 38.0),
        (lambda g, t: TwoStores(g, t, 0.9), "mixed_long", JAMBA, 4, 100.67),
        (dynamic, "mixed_long", JAMBA, 4, 75.0),
    ],
)
def test_out_of_memory_events_equal_the_published_ones(make, workload, geometry, gib, published):
    assert mean_oom(make, workload, geometry, gib) == published


def test_thresholds_change_nothing_in_the_released_code_and_something_in_the_papers_text():
    trace = generate("mixed_long", 0)
    reference = replay(dynamic(JAMBA, 4 * GIB), trace, JAMBA)
    for low, high in ((0.02, 0.30), (0.05, 0.10)):
        config = AvmpConfig(threshold_low=low, threshold_high=high)
        assert replay(dynamic(JAMBA, 4 * GIB, config), trace, JAMBA) == reference
    assert reference.rebalances > 30
    gated = replay(dynamic(JAMBA, 4 * GIB, AvmpConfig(gated=True)), trace, JAMBA)
    assert 0 < gated.rebalances < reference.rebalances


def test_the_metric_calls_killed_requests_completed():
    outcome = replay(dynamic(JAMBA, GIB), generate("agentic_burst", 0), JAMBA)
    assert (outcome.completed, outcome.killed, outcome.intact) == (226, 251, 5)
    assert outcome.reserved_bytes == 2 * GIB


def test_allocators_stay_consistent_while_they_kill():
    allocator = dynamic(JAMBA, GIB)
    requests = generate("mixed_long", 1)[:60]
    for request in requests:
        allocator.arrive(request)
        allocator.check()
    for request in requests:
        allocator.grow(request, 0)
        allocator.depart(request)
        allocator.check()
    assert [store.free_pages for store in allocator.stores] == [store.capacity for store in allocator.stores]


def test_a_migration_that_fails_half_way_is_rolled_back():
    allocator = dynamic(JAMBA, 64 << 20, AvmpConfig(batch_units=4))
    state, kv = allocator.stores[STATE], allocator.stores[KV]
    kv.limit = kv.capacity  # the recipient cannot grow
    before = state.capacity
    assert not allocator.migrate(KV)
    assert (state.capacity, allocator.counters["rebalances"]) == (before, 0)
    allocator.check()


def test_states_follow_figure_2():
    monitor = PressureMonitor(AvmpConfig(gated=True, min_interval_ops=5))
    assert monitor.observe(0.5, 0.5) is Pressure.BALANCED
    assert monitor.observe(0.01, 0.5) is Pressure.KV_PRESSURED
    assert monitor.observe(0.5, 0.01) is Pressure.SSM_PRESSURED
    assert not monitor.start(donor_free=0.30)
    assert monitor.start(donor_free=0.31)
    assert monitor.state is Pressure.REBALANCING
    assert monitor.observe(0.4, 0.4) is Pressure.BALANCED
    assert not monitor.start(donor_free=0.9)
    assert monitor.throttled == 1
    for _ in range(5):
        monitor.observe(0.4, 0.4)
    assert monitor.start(donor_free=0.9)
    assert monitor.counts[Pressure.REBALANCING, Pressure.BALANCED] == 1


def test_a_tail_store_shrinks_only_over_free_pages_at_its_end():
    store = TailStore(limit=10, capacity=6)
    assert store.take(2).tolist() == [0, 1]
    assert store.resize(3)
    assert not store.resize(1)
    assert store.resize(8)
    assert store.take(1).tolist() == [7]  # grown pages come first, so the tail is blocked at once
    assert not store.resize(7)
    assert not store.resize(11)
    assert store.take(99) is None
    store.check()
    with pytest.raises(InvariantError):
        store.give(store.take(1).repeat(1) + 1)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: AvmpConfig(threshold_low=0.3, threshold_high=0.3),
        lambda: AvmpConfig(batch_units=0),
        lambda: TwoStores(JAMBA, GIB, 1.0),
        lambda: Geometry("odd", state_block_bytes=100),
        lambda: generate("no_such_workload", 0),
    ],
)
def test_bad_settings_are_config_errors(bad):
    with pytest.raises(ConfigError):
        bad()


def test_alignment():
    assert (align_up(1, 128), align_up(128, 128), align_up(17, 16)) == (128, 128, 32)
