import pytest

from avmp.limits import LimitedBudget
from sglang_hybrid.core.errors import InvariantError, PoolExhausted
from sglang_hybrid.memory.backing import LedgerBacking
from sglang_hybrid.memory.layout import Layout, Planes, first_planes

G = 1024


def build(total, limits):
    """A KV column is 16 pages and 2 granules, one of states 2 states and 3 granules."""
    kv = Layout("kv", (Planes("kv", 2, 64),), slots=16 * 16, granule_bytes=G)
    state = Layout("state", (Planes("state", 3, 512),), slots=20, granule_bytes=G)
    budget = LimitedBudget(total * G, G, LedgerBacking([*kv.plane_granules, *state.plane_granules]), limits)
    kv_first, state_first = first_planes([kv, state])
    return budget, budget.add_pool(kv, kv_first), budget.add_pool(state, state_first)


def test_limits_are_a_static_split():
    budget, kv, state = build(20, {"kv": 4, "state": 16})
    kv.alloc(32)
    with pytest.raises(PoolExhausted):
        kv.alloc(1)
    state.alloc(8)
    budget.check()
    budget.limits["kv"] = 3
    with pytest.raises(InvariantError, match="exceeds its limit"):
        budget.check()


def test_what_is_obtainable_ends_at_the_limit():
    budget, kv, state = build(9, {"kv": 6})
    pages = kv.alloc(20)
    assert (budget.obtainable(kv), budget.obtainable(state)) == (12 + 16, 2)
    kv.free(pages[:16])  # a loose column counts as in use until somebody sorts
    assert (budget.obtainable(kv), budget.obtainable(state)) == (28 + 16, 2)
    kv.sort()
    assert (budget.obtainable(kv), budget.obtainable(state)) == (12 + 32, 4)
    state.alloc(4)
    assert budget.obtainable(kv) == 12
    kv.alloc(12)
    assert budget.obtainable(kv) == 0
    budget.check()
