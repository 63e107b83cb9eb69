"""HiCache behind our components: the tree alone first, then one server."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
from restart import TieredTree
from test_cache_tree import sequences

from sglang_hybrid.engine.cache.tiers import HOST
from sglang_hybrid.prefix.candidates import Candidates
from sglang_hybrid.prefix.serving import Pool

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::Warning:sglang")]


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize(("eviction", "page"), [("forecast", 1), ("marconi", 64), ("lru", 1)])
def test_random_steps_restore_every_bit(eviction: str, page: int, write_policy: str) -> None:
    """Whatever a request restarts from, on the device or loaded back, is what was computed for its tokens."""
    size = {"tokens": 4096 if page > 1 else 600, "states": 8, "page_size": page}
    tree = TieredTree(eviction, **size, host_ratio=1.5, write_policy=write_policy)
    assert tree.driver is not None
    rng, restored = random.Random(page), 0
    for _ in range(600):
        tree.clock.advance(rng.choice((0.0, 0.5, 30.0)))
        if rng.random() < 0.5:
            tree.insert(sequences(rng, page))
        elif len(tree.running) < 7:
            restored += tree.restart(sequences(rng, page), runs=rng.random() < 0.4)[1]
        if tree.running and rng.random() < 0.25:
            tree.end(rng.randrange(len(tree.running)))
        if rng.random() < 0.8:
            tree.step()
        tree.check()
    assert restored > 500, "nothing came back, so nothing was tested"
    assert tree.driver.counts["states_evicted"] > 20


@pytest.mark.parametrize("eviction", ["forecast", "marconi"])
def test_the_victim_is_the_lowest_score_of_its_tier(eviction: str) -> None:
    """Fed only what changed, the indices of both tiers give what scoring everything in the pool anew gives."""
    rng, tree = random.Random(1), TieredTree(eviction, tokens=1500, states=12, host_ratio=2)
    assert tree.driver is not None
    victims, decisions, core = tree.driver.victims, tree.driver.decisions, tree.core
    compared = Counter[Pool]()
    for _ in range(250):
        tree.clock.advance(rng.uniform(0, 20))
        tree.insert(sequences(rng, 1))
        tree.restart(sequences(rng, 1))
        tree.step()
        victims.sync(core)
        for pool in Pool:
            nodes = [core._node_arena[i] for i in victims._known[pool]]
            if len(nodes) < 2:
                continue
            price = partial(victims._hosted, core) if pool in HOST.values() else victims._candidate
            scores = decisions.policy(pool).scores(Candidates.of(map(price, nodes)), tree.clock.now())
            chosen = victims.next(core, pool, tree.clock.now(), set())
            victims.touch(chosen)  # it stays
            mine = scores[[node.id for node in nodes].index(chosen.id)]
            assert mine <= np.min(scores) * (1 + 1e-9) + 1e-300
            compared[pool] += 1
    assert min(compared[pool] for pool in Pool) > 100


def test_a_second_state_of_a_pass_is_copied_too() -> None:
    """SGLang leaves it out: it copies the end of an insertion, and not what is attached while that copy runs."""
    tree = TieredTree("forecast", host_ratio=4)
    long = [7] * 300
    tree.insert(long)
    tree.insert(long[:200])  # the same pass: no step between them
    for _ in range(2):
        tree.step()
    tree.evict(tree.slots.size, tree.rows.mamba_allocator.size)
    assert tree.held() == (0, 0)
    assert tree.restart(long[:200] + [8] * 50) == (200, 200)
    assert tree.restart([*long, 9]) == (300, 100)


def test_a_state_is_lost_when_it_left_both_tiers() -> None:
    tree = TieredTree("forecast", tokens=600, states=4, host_ratio=1)
    assert tree.driver is not None
    mark = tree.driver.decisions.mark(None, 200, 0.0)
    tree.insert([1] * 200)
    tree.core.node_by_id(tree.match([1] * 200)[1]).hybrid_mark = mark
    tree.step()
    tree.evict(600, 4)
    assert not mark.lost
    for other in range(2, 9):
        tree.insert([other] * 200)
        tree.step()
    assert mark.lost
    assert tree.restart([1] * 200) == (0, 0)
