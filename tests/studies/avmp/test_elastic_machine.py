"""Backing, pools and policy against a model made of sets: any call, in any order, with failing drivers."""

import itertools

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from avmp.demand import Demand, Growth
from avmp.elastic import Elastic
from avmp.limits import LimitedBudget
from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.memory.budget import ReturnConfig
from sglang_hybrid.memory.layout import Layout, Planes, first_planes
from tests.stateful.paper_driver import GRANULE as G
from tests.stateful.paper_driver import PaperDriver, mapped_granules

TOTAL = 20


class ElasticMachine(RuleBasedStateMachine):
    """Requests come with and without growth bounds, grow, leave entries, are read again; memory idles and fails."""

    def __init__(self):
        super().__init__()
        kv = Layout("kv", (Planes("kv", 2, 256),), slots=4 * 12, granule_bytes=G, pinned_pages=1)
        conv = Planes("conv", 1, G // 4)
        state = Layout("state", (Planes("temporal", 2, G), conv), slots=10, granule_bytes=G)
        self.driver = PaperDriver()
        self.backing = PooledBacking(self.driver, [*kv.plane_granules, *state.plane_granules], G, limit=TOTAL)
        self.budget = LimitedBudget(TOTAL * G, G, self.backing, returns=ReturnConfig(idle=5, band=4))
        layouts = [kv, state]
        self.first_planes = dict(zip(("kv", "state"), first_planes(layouts), strict=True))
        self.pools = {each.name: self.budget.add_pool(each, self.first_planes[each.name]) for each in layouts}
        self.elastic = Elastic(self.budget)
        self.held = {}  # request -> pool -> set of pages
        self.kept = {}  # entry key -> (pool, set of pages)
        self.ids = itertools.count()

    def _evicted(self, keys):
        for key in keys:
            assert not self.elastic.entries.locked(key)
            del self.kept[key]

    @rule(data=st.data(), kv=st.integers(0, 20), states=st.integers(0, 3), later=st.integers(0, 12))
    def admit(self, data, kv, states, later):
        uses = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True, max_size=2)) if self.kept else []
        growth = None
        if data.draw(st.booleans()):
            first, every, at_once = (data.draw(st.integers(*bounds)) for bounds in ((0, 4), (1, 2), (1, 2)))
            growth = Growth(first, every, first + every * later + data.draw(st.integers(1, 3)), at_once)
        before = set(self.kept)
        request_id = next(self.ids)
        try:
            demand = Demand({"kv": kv, "state": states}, {"kv": later}, growth)
            lease, evicted = self.elastic.admit(request_id, demand, uses)
        except (PoolExhausted, ConfigError) as error:
            if "injected" not in str(error):
                assert set(self.kept) == before == {entry.key for entry in self.elastic.entries}
            else:
                self._evicted(before - {entry.key for entry in self.elastic.entries})
            return
        self._evicted(evicted)
        self.held[request_id] = {name: set(lease.pages[name].tolist()) for name in self.pools}
        assert [len(self.held[request_id][name]) for name in ("kv", "state")] == [kv, states]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 4), pool=st.sampled_from(["kv", "state"]))
    def extend(self, data, count, pool):
        lease = self.elastic.leases[data.draw(st.sampled_from(sorted(self.held)))]
        owed = len(lease.spare[pool]) + lease.due(pool, self.elastic.step)
        before = {entry.key for entry in self.elastic.entries}
        try:
            pages, evicted = self.elastic.extend(lease, pool, count)
        except PoolExhausted as error:
            if count <= owed and "injected" not in str(error):
                raise AssertionError("a promise was broken") from error
            self._evicted(before - {entry.key for entry in self.elastic.entries})
            return
        self._evicted(evicted)
        mine = self.held[lease.request_id][pool]
        assert len(pages) == count
        assert not mine & set(pages.tolist())
        mine.update(pages.tolist())

    def _finish(self, request_id, keep):
        lease = self.elastic.leases[request_id]
        held = self.held.pop(request_id)
        entries = {}
        for pool, pages in held.items():
            if keep and pages:
                key = next(self.ids)
                part = sorted(pages)[: max(1, len(pages) // 2)]
                entries[key] = (pool, np.array(part, dtype=np.int64), float(keep))
                self.kept[key] = (pool, set(part))
        self.elastic.finish(lease, entries)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.integers(0, 3))
    def finish(self, data, keep):
        self._finish(data.draw(st.sampled_from(sorted(self.held))), keep)

    @rule(steps=st.integers(1, 4))
    def advance(self, steps):
        self.elastic.step += steps
        for request_id in sorted(self.held):  # lockstep: a bounded request is over at its end
            lease = self.elastic.leases[request_id]
            if lease.growth and lease.step + lease.growth.end <= self.elastic.step:
                self._finish(request_id, 0)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def evict(self, data):
        key = data.draw(st.sampled_from(sorted(self.kept)))
        if self.elastic.entries.locked(key):
            try:
                self.elastic.evict(key)
            except InvariantError:
                return
            raise AssertionError("a locked entry was evicted")
        self.elastic.evict(key)
        del self.kept[key]

    @rule(keep=st.integers(0, 4))
    def idle(self, keep):
        self.elastic.settle()
        self.backing.trim(keep)

    @rule(method=st.sampled_from(["create", "map", "allow"]), after=st.integers(0, 3))
    def let_fail(self, method, after):
        self.driver.failing = (method, after)

    @invariant()
    def the_model_agrees(self):
        self.elastic.check()
        self.backing.check()
        assert {entry.key: (entry.pool, set(entry.pages.tolist())) for entry in self.elastic.entries} == self.kept
        assert self.budget.free + self.budget.used + self.budget.unmapped == TOTAL
        wanted = {
            self.backing.address(*at)
            for name, pool in self.pools.items()
            for at in mapped_granules(pool, self.first_planes[name])
        }
        assert set(self.driver.mapped) == wanted
        assert self.budget.mapped == len(wanted)
        assert len(self.driver.handles) <= TOTAL
        for name, pool in self.pools.items():
            live = [page for held in self.held.values() for page in held[name]]
            live += [page for kept, pages in self.kept.values() if kept == name for page in pages]
            assert len(set(live)) == len(live) <= pool.live_pages

    def teardown(self):
        self.driver.failing = None
        self.backing.close()
        assert (self.driver.mapped, self.driver.handles, self.driver.reserved) == ({}, set(), {})


ElasticMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestElasticMemory = ElasticMachine.TestCase
