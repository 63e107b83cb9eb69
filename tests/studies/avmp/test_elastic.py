import numpy as np
import pytest

from avmp.demand import Demand, Growth
from avmp.elastic import Elastic
from avmp.limits import LimitedBudget
from avmp.pressure import AvmpConfig
from avmp.rebalance import Avmp, Transfer, apply, split
from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.memory.backing import LedgerBacking
from sglang_hybrid.memory.layout import Layout, Planes, first_planes

G = 1024


STATE = (Planes("state", 4, G),)


def build(total=12, capacity=None, state_planes=STATE, limits=None, **kwargs):
    """A KV column is 16 pages and 2 granules, a state is a column of 4 granules."""
    kv = Layout("kv", (Planes("kv", 2, 64),), slots=16 * 64, granule_bytes=G)
    state = Layout("state", state_planes, slots=64, granule_bytes=G)
    backing = LedgerBacking([*kv.plane_granules, *state.plane_granules], capacity)
    budget = LimitedBudget(total * G, G, backing, limits)
    first = first_planes([kv, state])
    budget.add_pool(kv, first[0])
    budget.add_pool(state, first[1])
    return Elastic(budget, **kwargs)


def test_admission_is_whole_or_nothing():
    elastic = build(total=12)
    elastic.admit(1, Demand({"kv": 16, "state": 1}))
    with pytest.raises(PoolExhausted, match="wait for a running request"):
        elastic.admit(2, Demand({"kv": 17, "state": 1}))
    assert elastic.budget.pools["kv"].live_pages == 16
    elastic.check()
    elastic.admit(2, Demand({"kv": 16, "state": 1}))
    elastic.check()


def test_a_promise_is_kept_whatever_comes_after():
    elastic = build(total=12)
    first, _ = elastic.admit(1, Demand({"kv": 16, "state": 1}, {"kv": 32}))
    with pytest.raises(PoolExhausted):
        elastic.admit(2, Demand({"kv": 1, "state": 1}))
    elastic.admit(3, Demand({"kv": 16}))
    with pytest.raises(PoolExhausted):
        elastic.admit(4, Demand({"kv": 1}))
    for _ in range(32):
        pages, evicted = elastic.extend(first, "kv", 1)
        assert (len(pages), evicted) == (1, [])
        elastic.check()
    with pytest.raises(PoolExhausted):
        elastic.extend(first, "kv", 1)
    elastic.check()


def test_promises_of_shared_columns_are_taken_at_once():
    elastic = build(total=30, state_planes=(Planes("temporal", 2, G), Planes("conv", 2, G // 4)))
    lease, _ = elastic.admit(1, Demand({"state": 1}, {"state": 2}))
    assert (len(lease.pages["state"]), len(lease.spare["state"]), lease.promised["state"]) == (1, 2, 0)
    pages, _ = elastic.extend(lease, "state", 2)
    assert len(pages) == 2
    elastic.check()
    elastic.finish(lease)
    elastic.check()


def cached(elastic, key, pool, count, value, request_id=1000):
    lease, _ = elastic.admit(request_id + key, Demand({pool: count}))
    elastic.finish(lease, {key: (pool, lease.pages[pool], value)})


def test_eviction_takes_least_value_per_byte_from_either_kind():
    elastic = build(total=12)
    cached(elastic, 1, "kv", 16, value=1.0)  # 2 KiB: 0.5 per KiB
    cached(elastic, 2, "state", 1, value=1.0)  # 4 KiB: 0.25 per KiB
    cached(elastic, 3, "kv", 16, value=3.0)
    _, evicted = elastic.admit(1, Demand({"kv": 64}))
    assert evicted == [2]
    elastic.check()


def test_a_cheap_entry_that_does_not_help_is_spared():
    elastic = build(total=12)
    cached(elastic, 1, "kv", 8, value=0.1)  # shares its column with a running request: frees no granule
    running, _ = elastic.admit(1, Demand({"kv": 8}))
    cached(elastic, 2, "state", 1, value=9.0)
    cached(elastic, 3, "state", 1, value=10.0)
    _, evicted = elastic.admit(2, Demand({"state": 1}))
    assert evicted == [2]
    assert len(elastic.entries) == 2
    elastic.finish(running)
    elastic.check()


def test_running_requests_and_what_they_read_are_never_robbed():
    elastic = build(total=12)
    cached(elastic, 1, "kv", 16, value=0.0)
    reader, _ = elastic.admit(1, Demand({"kv": 16}), uses=[1])
    elastic.admit(2, Demand({"state": 2}))
    with pytest.raises(PoolExhausted):
        elastic.admit(3, Demand({"kv": 1}))
    with pytest.raises(InvariantError):
        elastic.evict(1)
    elastic.finish(reader)
    assert elastic.admit(3, Demand({"kv": 32}))[1] == [1]
    elastic.check()


def test_nothing_is_evicted_for_a_request_that_cannot_start():
    elastic = build(total=11)
    cached(elastic, 1, "kv", 16, value=0.0)
    elastic.admit(1, Demand({"state": 2}))
    with pytest.raises(PoolExhausted):
        elastic.admit(2, Demand({"state": 1}))
    assert len(elastic.entries) == 1


def test_a_lock_may_not_break_a_promise():
    elastic = build(total=12)
    cached(elastic, 1, "kv", 16, value=1.0)
    lease, evicted = elastic.admit(1, Demand({"kv": 16, "state": 1}, {"kv": 32}))
    assert evicted == []
    with pytest.raises(PoolExhausted):
        elastic.admit(2, Demand({"kv": 16}), uses=[1])
    assert not elastic.entries.locked(1)
    elastic.check()
    _, evicted = elastic.extend(lease, "kv", 32)
    elastic.check()
    assert lease.promised["kv"] == 0


def test_lockstep_growth_counts_what_earlier_requests_give_back():
    growth = Growth(first=1, every=1, end=16)
    plain, lockstep = build(total=6), build(total=6)
    for elastic, bound in ((plain, None), (lockstep, growth)):
        elastic.admit(1, Demand({"kv": 16}, {"kv": 16}, bound))
        elastic.step = 16
    with pytest.raises(PoolExhausted):
        plain.admit(2, Demand({"kv": 32}, {"kv": 16}))
    early = lockstep.leases[1]
    lockstep.step = 0
    lockstep.admit(2, Demand({"kv": 16}, {"kv": 32}, Growth(first=17, every=1, end=64)))
    lockstep.check()
    for step in range(1, 16):
        lockstep.step = step
        lockstep.extend(early, "kv", 1)
        lockstep.check()
    lockstep.step = 16
    lockstep.finish(early)
    late = lockstep.leases[2]
    for step in range(17, 49):
        lockstep.step = step
        lockstep.extend(late, "kv", 1)
        lockstep.check()
    assert late.promised["kv"] == 0


def test_getting_ahead_of_the_schedule_needs_room_beside_the_promises():
    elastic = build(total=6)
    hasty, _ = elastic.admit(1, Demand({"kv": 16}, {"kv": 16}, Growth(first=40, every=1, end=64)))
    elastic.admit(2, Demand({"kv": 16}, {"kv": 16}, Growth(first=0, every=1, end=20)))
    with pytest.raises(PoolExhausted):
        elastic.extend(hasty, "kv", 16)
    assert hasty.promised["kv"] == 16
    elastic.check()


def test_budget_smaller_than_one_request_is_found_at_start_and_at_admission():
    with pytest.raises(ConfigError, match="raise the budget to 6144 bytes"):
        build(total=5, smallest=Demand({"kv": 1, "state": 1}))
    elastic = build(total=12)
    with pytest.raises(ConfigError, match="shorten the request"):
        elastic.admit(1, Demand({"kv": 16 * 7}))
    with pytest.raises(ConfigError, match="share of pool 'state'"):
        build(limits={"kv": 9, "state": 3}, smallest=Demand({"state": 1}))
    with pytest.raises(ConfigError):
        Demand({"kv": -1})
    with pytest.raises(ConfigError):
        Growth(first=0, every=0, end=1)


def test_a_machine_smaller_than_its_budget_degrades_and_leaks_nothing():
    elastic = build(total=12, capacity=5)
    with pytest.raises(PoolExhausted, match="lower the budget"):
        elastic.admit(1, Demand({"kv": 16, "state": 1}))
    elastic.check()
    assert elastic.budget.used == 0
    lease, _ = elastic.admit(1, Demand({"kv": 16}, {"kv": 64}))
    elastic.extend(lease, "kv", 16)
    with pytest.raises(PoolExhausted):
        elastic.extend(lease, "kv", 16)
    assert lease.promised["kv"] == 48
    elastic.check()


def test_misuse_is_an_invariant_error():
    elastic = build()
    lease, _ = elastic.admit(1, Demand({"kv": 2}))
    with pytest.raises(InvariantError):
        elastic.admit(1, Demand({"kv": 1}))
    for pages in ([999], [*lease.pages["kv"][:1], *lease.pages["kv"][:1]]):
        with pytest.raises(InvariantError, match="only those the request holds"):
            elastic.finish(lease, {1: ("kv", np.array(pages), 1.0)})
    with pytest.raises(ConfigError, match="nothing else"):
        elastic.admit(2, Demand({"kvv": 1}))
    elastic.finish(lease)
    with pytest.raises(InvariantError):
        elastic.finish(lease)
    with pytest.raises(InvariantError):
        elastic.evict(5)
    elastic.check()


def test_same_calls_same_decisions():
    def run():
        elastic = build(total=40)
        rng = np.random.default_rng(3)
        log = []
        for index in range(200):
            try:
                demand = Demand({"kv": int(rng.integers(1, 40)), "state": int(rng.integers(0, 3))})
                lease, evicted = elastic.admit(index, demand)
                log.append((lease.pages["kv"].tolist(), evicted))
                elastic.finish(lease, {index: ("kv", lease.pages["kv"], float(rng.random()))})
            except PoolExhausted as error:
                log.append(str(error))
            log.append(elastic.settle())
        elastic.check()
        return log

    assert run() == run()


def test_idle_memory_is_returned():
    elastic = build(total=12)
    lease, _ = elastic.admit(1, Demand({"kv": 32, "state": 1}))
    elastic.finish(lease)
    elastic.budget.sort()
    assert elastic.budget.free == 8
    for _ in range(1001):
        elastic.settle()
    assert elastic.budget.mapped == 0


def test_avmp_policy_moves_a_batch_between_limits():
    policy = Avmp(AvmpConfig(batch_units=1, gated=True))
    elastic = build(total=20, limits={"kv": 10, "state": 10}, rebalance=policy)
    elastic.budget.limits = split(elastic.budget, 0.5)
    elastic.admit(1, Demand({"kv": 16 * 5}))
    elastic.admit(2, Demand({"kv": 16}))
    assert elastic.budget.limits == {"kv": 14, "state": 6}
    elastic.admit(3, Demand({"kv": 16}))
    with pytest.raises(PoolExhausted):  # throttled: fewer than 1000 operations since the last migration
        elastic.admit(4, Demand({"kv": 16}))
    assert policy.monitor.throttled == 1
    elastic.check()
    with pytest.raises(ConfigError):
        apply(elastic.budget, Transfer("kv", "state", 14))
    with pytest.raises(ConfigError):
        split(elastic.budget, 1.0)
