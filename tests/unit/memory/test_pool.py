import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.memory.backing import LedgerBacking, Run
from sglang_hybrid.memory.budget import Budget, ReturnConfig
from sglang_hybrid.memory.layout import Layout, Planes, first_planes

G = 1024


class Recorder(LedgerBacking):
    """A ledger that also remembers the order of calls, and refuses to map at a chosen call."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.calls = []
        self.refuse_map = False

    def map(self, runs):
        if self.refuse_map:
            raise PoolExhausted("the machine is out of memory: injected")
        self.calls.append(("map", tuple(runs)))
        super().map(runs)

    def unmap(self, runs):
        self.calls.append(("unmap", tuple(runs)))
        super().unmap(runs)


def build(total=20, returns=None, state_planes=None, pinned=0):
    kv = Layout(
        "kv", (Planes("kv", 2, 64),), slots=16 * 16, granule_bytes=G, pinned_pages=pinned
    )  # 16 pages, 2 granules
    state = Layout("state", state_planes or (Planes("state", 3, 512),), slots=20, granule_bytes=G)
    backing = Recorder([*kv.plane_granules, *state.plane_granules])
    budget = Budget(total * G, G, backing, returns)
    first = first_planes([kv, state])
    return budget, budget.add_pool(kv, first[0]), budget.add_pool(state, first[1]), backing


def test_account_adds_up_and_matches_the_backing():
    budget, kv, state, backing = build()
    a, b = kv.alloc(20), state.alloc(3)
    assert (budget.used, budget.free, budget.unmapped) == (4 + 6, 0, 10)
    assert len(backing.mapped) == 10
    kv.free(a)
    assert (budget.used, budget.free, budget.unmapped) == (10, 0, 10), "looking at the account sorts nothing"
    budget.sort()
    assert (budget.used, budget.free, budget.unmapped) == (6, 4, 10)
    state.free(b)
    budget.sort()
    budget.check()
    assert (budget.used, budget.free) == (0, 10)


def test_the_fullest_column_gives_first_so_the_others_run_empty():
    budget, kv, _, _ = build()
    pages = kv.alloc(48)
    kv.free(pages[pages // 16 == 0][:2])
    kv.free(pages[pages // 16 == 1][:15])
    kv.sort()
    fresh = kv.alloc(3)
    assert (fresh // 16).tolist() == [0, 0, 1]
    kv.free(pages[pages // 16 == 2])
    kv.sort()
    assert kv.columns.used_granules == 4
    budget.check()


def test_a_free_page_never_blocks_shrinking():
    budget, kv, _, backing = build(returns=ReturnConfig(idle=0))
    low, high = kv.alloc(16), kv.alloc(16)
    kv.free(low)
    assert budget.settle(now=1.0) == 2
    assert (0, 0) not in backing.mapped
    assert (0, 1) in backing.mapped
    kv.free(high)
    budget.check()


def test_memory_moves_between_kinds_on_demand():
    budget, kv, state, _ = build(total=6)
    pages = kv.alloc(48)
    with pytest.raises(PoolExhausted, match="evict or wait"):
        state.alloc(1)
    kv.free(pages[:32])
    states = state.alloc(2)
    assert budget.unmapped + budget.free == 6 - 3 - 2
    kv.free(pages[32:])
    state.free(states)
    budget.check()


def test_a_refused_allocation_changes_nothing():
    budget, kv, _, backing = build(total=6)
    kv.alloc(30)
    before = (kv.room, kv.live_pages, set(backing.mapped))
    with pytest.raises(PoolExhausted):
        kv.alloc(100)
    backing.refuse_map = True
    with pytest.raises(PoolExhausted, match="injected"):
        kv.alloc(17)
    assert (kv.room, kv.live_pages, backing.mapped) == before
    budget.check()


def test_unmapping_a_live_column_is_our_bug_and_reaches_no_driver():
    budget, kv, _, backing = build()
    kv.alloc(1)
    calls = len(backing.calls)
    with pytest.raises(InvariantError, match="free its pages first"):
        budget.release(kv, 0)
    with pytest.raises(InvariantError, match="unmapped"):
        budget.release(kv, 3)
    assert len(backing.calls) == calls


WRONG = [
    [0, 0],
    [3, 999999],
    [-1],
    [60],
    [*range(40), *range(30, 50)],  # two runs that overlap
    [*range(40), 45, 43, 45],  # a run, then one page twice
    [*range(40), *range(46, 90)],  # a run, then one that leaves the live pages
    [*range(40), 255, 256, 257],
    range(-8, 8),
    range(240, 272),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_sorting_finds_what_was_not_live(wrong):
    budget, kv, _, _ = build()
    kv.alloc(60)

    def free_and_ask():
        kv.free(np.array(wrong))
        budget.settle(now=0.0)

    with pytest.raises(InvariantError, match=r"once, while it is live|freed twice or while not live"):
        free_and_ask()


def test_more_pages_than_are_live_are_refused_at_once():
    budget, kv, _, _ = build(pinned=1)
    pages = kv.alloc(20)
    with pytest.raises(InvariantError, match="21 pages"):
        kv.free(np.concatenate([pages, [0]]))
    kv.free(pages)
    budget.check()
    assert kv.live_pages == 1


def test_loose_pages_come_first_and_drawn_ones_lowest_first_in_runs():
    budget, kv, _, _ = build()
    pages = kv.alloc(48)
    kv.free(pages[[3, 4, 5, 9, 20]])
    kv.sort()
    assert kv.alloc(4).tolist() == [20, 3, 4, 5]  # column 1 is fuller than column 0
    kv.free(pages[10:40])
    assert kv.alloc(3).tolist() == [10, 11, 12]  # 9, drawn with the others of its column, is loose as well
    kv.check()
    kv.sort()
    assert kv.alloc(20).tolist() == [9, 13, 14, 15, *range(32, 40), *range(16, 24)]
    budget.check()


def test_freeing_moves_nothing_until_somebody_asks_about_memory():
    budget, kv, state, backing = build(total=5)
    pages = kv.alloc(20)
    calls = len(backing.calls)
    for _ in range(3):
        kv.free(pages)
        kv.check()
        assert (kv.live_pages, kv.room) == (0, 32)
        again = kv.alloc(20)
        assert again.tolist() == pages.tolist()
    kv.free(pages[:16])
    assert len(backing.calls) == calls
    assert len(state.alloc(1)) == 1  # asks for memory, so column 0 of kv runs empty
    assert kv.room == 12
    budget.check()


def test_whoever_hoards_free_pages_is_asked_before_memory_moves():
    """An allocator with a free list of its own on the device: pages live for the pool, unused by anybody."""
    budget, kv, state, _ = build(total=5)
    hoard = [kv.alloc(30)]

    def give_back():
        while hoard:
            kv.free(hoard.pop())

    kv.recall = give_back
    assert budget.obtainable(state) == 0
    assert budget.obtainable(kv) == 2
    assert len(hoard) == 1  # a capacity question disturbs nobody
    kv.alloc(2)
    with pytest.raises(PoolExhausted):
        state.alloc(3)
    assert (hoard, kv.live_pages, budget.used) == ([], 2, 2)
    assert len(state.alloc(1)) == 1
    budget.check()


def test_what_is_obtainable_can_be_had():
    budget, kv, state, _ = build(total=9)
    pages = kv.alloc(20)
    assert (budget.obtainable(kv), budget.obtainable(state)) == (12 + 32, 2)
    kv.free(pages[:16])  # a loose column counts as in use until somebody sorts
    assert (budget.obtainable(kv), budget.obtainable(state)) == (28 + 32, 2)
    kv.sort()
    assert (budget.obtainable(kv), budget.obtainable(state)) == (12 + 48, 4)
    state.alloc(4)
    assert budget.obtainable(kv) == 12
    kv.alloc(12)
    assert budget.obtainable(kv) == 0
    budget.check()


def test_the_caller_keeps_its_arrays():
    _, kv, _, _ = build()
    pages = kv.alloc(20)
    kept = pages.copy()
    kv.free(pages)
    pages[:] = -5
    again = kv.alloc(20)
    kv.free(again[:5])
    assert again.tolist() == kept.tolist()
    assert kv.alloc(5).tolist() == kept[:5].tolist()


def test_many_loose_pages_are_sorted_unasked():
    layout = Layout("kv", (Planes("kv", 1, 64),), slots=1 << 16, granule_bytes=G)
    budget = Budget(G << 12, G, LedgerBacking(layout.plane_granules))
    kv = budget.add_pool(layout)
    pages = kv.alloc(layout.pages)
    kv.free(pages[: 1 << 15])
    assert kv.room == 1 << 15
    kv.free(pages[1 << 15 :][:1])
    assert kv.room == 1  # whole columns left
    budget.check()


def test_scattered_frees_of_many_columns():
    budget, kv, _, _ = build(total=32)
    pages = kv.alloc(16 * 16)
    np.random.default_rng(7).shuffle(pages)
    for part in np.array_split(pages, 5):
        kv.free(part)
        kv.check()
        kv.sort()
        budget.check()
    assert kv.live_pages == kv.room == 0


def test_idle_memory_returns_with_hysteresis():
    returns = ReturnConfig(idle=10, band=8)
    budget, kv, _, _ = build(total=30, returns=returns)
    pages = kv.alloc(16 * 5)
    kv.now = 100.0
    kv.free(pages[: 16 * 4])
    budget.sort()
    assert budget.free == 8
    assert budget.settle(now=109.0) == 0  # not idle yet
    assert budget.settle(now=110.0) == 0  # within the band
    kv.free(pages[16 * 4 :])
    assert budget.settle(now=110.0, most=3) == 4
    assert budget.settle(now=110.0) == 6  # what was begun goes on
    assert (budget.free, budget.unmapped) == (0, 30)
    assert budget.settle(now=999.0) == 0
    budget.check()


def test_a_warm_column_needs_no_driver_call():
    budget, _, state, backing = build()
    state.free(state.alloc(2))
    state.sort()
    calls = len(backing.calls)
    state.alloc(2)
    assert len(backing.calls) == calls
    budget.check()


def test_columns_that_share_granules_are_counted_once():
    planes = (Planes("temporal", 3, G), Planes("conv", 3, G // 4))
    budget, _, state, backing = build(total=30, state_planes=planes)
    slots = state.alloc(4)
    assert budget.used == 3 * 4 + 3
    fifth = state.alloc(1)
    assert budget.used == 3 * 5 + 6
    state.free(slots[1:])
    budget.sort()
    assert budget.used == 3 * 2 + 6
    state.free(fifth)
    budget.sort()
    assert (budget.used, budget.free) == (6, 3 * 4 + 3)
    budget.returns = ReturnConfig(idle=0)
    budget.settle(now=5.0)
    assert len(backing.mapped) == budget.mapped == 6
    budget.check()


def test_pinned_pages_are_mapped_and_never_handed_out():
    budget, kv, _, _ = build(pinned=1)
    assert budget.used == 2
    pages = kv.alloc(15)
    assert 0 not in pages
    kv.free(pages)
    kv.sort()
    assert budget.used == 2
    with pytest.raises(InvariantError, match="once, while it is live"):
        kv.free(np.array([0]))
    budget.check()
    kv.alloc(15)
    kv.free(np.array([0]))
    with pytest.raises(InvariantError, match="pinned"):
        kv.check()
    with pytest.raises(InvariantError, match="freed twice or while not live"):
        budget.settle(now=1.0)


def test_bad_budgets():
    with pytest.raises(ConfigError, match="at least one granule"):
        Budget(G - 1, G, LedgerBacking([]))
    budget, _, _, _ = build()
    with pytest.raises(ConfigError, match="its own name"):
        budget.add_pool(Layout("kv", (Planes("kv", 1, 64),), slots=64, granule_bytes=G))
    with pytest.raises(ConfigError, match="granules of 1024"):
        budget.add_pool(Layout("seg", (Planes("kv", 1, 64),), slots=64, granule_bytes=2 * G))
    with pytest.raises(ConfigError, match="pinned"):
        build(total=1, pinned=1)
    with pytest.raises(ConfigError):
        ReturnConfig(idle=-1)


def test_address_space_exhausted():
    budget, kv, _, _ = build(total=100)
    with pytest.raises(PoolExhausted, match="more addresses"):
        kv.alloc(16 * 16 + 1)
    budget.check()


def test_ledger_contract():
    ledger = LedgerBacking([4, 4], capacity=3)
    ledger.map([Run(0, 0, 2)])
    for bad in ([Run(0, 1, 1)], [Run(2, 0, 1)], [Run(1, 3, 2)], [Run(1, 0, 1), Run(1, 0, 1)]):
        with pytest.raises(InvariantError):
            ledger.map(bad)
    with pytest.raises(PoolExhausted):
        ledger.map([Run(1, 0, 2)])
    for bad in ([Run(1, 0, 1)], [Run(0, 0, 1), Run(0, 0, 1)]):
        with pytest.raises(InvariantError):
            ledger.unmap(bad)
    assert ledger.mapped == {(0, 0), (0, 1)}
    assert ledger.trim(0) == 0
