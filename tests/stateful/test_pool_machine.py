"""Backing and three pools of one budget against sets: pages stay loose until memory is asked about, drivers fail."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.memory.budget import Budget, ReturnConfig
from sglang_hybrid.memory.layout import Layout, Planes, first_planes
from tests.stateful.paper_driver import GRANULE as G
from tests.stateful.paper_driver import PaperDriver, mapped_granules

TOTAL = 24
NAMES = st.sampled_from(["kv", "state", "segment"])


class PoolMachine(RuleBasedStateMachine):
    """Pages are taken and given back in any order; memory is asked about only now and then."""

    def __init__(self):
        super().__init__()
        layouts = [
            Layout("kv", (Planes("kv", 2, 64),), slots=16 * 10, granule_bytes=G, pinned_pages=1),
            Layout("state", (Planes("temporal", 2, G), Planes("conv", 1, G // 4)), slots=12, granule_bytes=G),
            Layout("segment", (Planes("segment", 1, G // 2),), slots=2 * TOTAL, granule_bytes=G),
        ]
        sizes = [size for layout in layouts for size in layout.plane_granules]
        self.driver = PaperDriver()
        self.backing = PooledBacking(self.driver, sizes, G, limit=TOTAL)
        self.budget = Budget(TOTAL * G, G, self.backing, returns=ReturnConfig(idle=3))
        starts = first_planes(layouts)
        self.first_planes = {each.name: at for each, at in zip(layouts, starts, strict=True)}
        self.pools = {each.name: self.budget.add_pool(each, self.first_planes[each.name]) for each in layouts}
        self.live = {"kv": [0], "state": [], "segment": []}
        self.time = 0.0

    @rule(name=NAMES, count=st.integers(0, 40))
    def alloc(self, name, count):
        pool = self.pools[name]
        obtainable = self.budget.obtainable(pool)
        assert obtainable >= pool.room
        try:
            pages = pool.alloc(count).tolist()
        except PoolExhausted as error:
            if count <= obtainable and "injected" not in str(error):
                raise AssertionError("what is obtainable was refused") from error
            return
        assert len(set(pages)) == len(pages) == count
        assert not set(pages) & set(self.live[name])
        self.live[name] += pages

    @rule(name=NAMES, data=st.data(), dtype=st.sampled_from([np.int32, np.int64]))
    def free(self, name, data, dtype):
        pinned = 1 if name == "kv" else 0
        shuffled = data.draw(st.permutations(self.live[name][pinned:]))
        count = data.draw(st.integers(0, len(shuffled)))
        self.pools[name].free(np.array(shuffled[:count], dtype=dtype))
        self.live[name] = [*self.live[name][:pinned], *shuffled[count:]]

    @rule(name=NAMES)
    def sort(self, name):
        pool = self.pools[name]
        pool.sort()
        columns = {page // pool.layout.column_pages for page in self.live[name]}
        assert pool.columns.live_columns == len(columns)
        assert pool.room == len(columns) * pool.layout.column_pages - len(self.live[name])

    @rule(step=st.integers(0, 4))
    def settle(self, step):
        self.time += step
        for pool in self.pools.values():
            pool.now = self.time
        self.budget.settle(self.time)
        self.budget.check()

    @rule(keep=st.integers(0, 4))
    def trim(self, keep):
        self.backing.trim(keep)

    @rule(method=st.sampled_from(["create", "map", "allow", "zero"]), after=st.integers(0, 3))
    def let_fail(self, method, after):
        self.driver.failing = (method, after)

    @invariant()
    def what_is_mapped_was_zeroed_since_it_was_unmapped(self):
        assert not self.driver.used & set(self.driver.mapped.values())

    @invariant()
    def one_story(self):
        wanted = set()
        for name, pool in self.pools.items():
            pool.check()
            assert pool.live_pages == len(self.live[name])
            wanted |= {self.backing.address(*at) for at in mapped_granules(pool, self.first_planes[name])}
        self.backing.check()
        assert set(self.driver.mapped) == wanted
        assert len(wanted) <= len(self.driver.handles) <= TOTAL

    def teardown(self):
        self.driver.failing = None
        self.backing.close()
        assert (self.driver.mapped, self.driver.handles, self.driver.reserved) == ({}, set(), {})


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestPool = PoolMachine.TestCase
