"""The cache's components over SGLang's real tree and pools: every container is checked after every random step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.requests import Tracked
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.tree.mark import Kind
from tests.engine.tree import Tree, compare_victims

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::Warning:sglang")]


def sequences(rng: random.Random, page: int) -> list[int]:
    """A sequence from a small family tree, so that prefixes are shared, split and extended."""
    tokens: list[int] = []
    for depth in range(rng.randint(1, 5)):
        branch = rng.choice((1, 1, 2, 3)) + 10 * depth
        tokens += [branch] * (page * rng.choice((1, 2, 5)) if page > 1 else rng.choice((3, 40, 90)))
    return tokens


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("policy", ["forecast", "marconi-online", "lru"])
def test_random_steps_leave_tree_pools_and_indices_consistent(policy: str, page: int) -> None:
    rng, tree = random.Random(page), Tree(policy, tokens=4096 if page > 1 else 1024, states=12, page_size=page)
    locks = []
    for step in range(400):
        tree.clock.advance(rng.choice((0.0, 0.5, 30.0)))
        action = rng.random()
        if action < 0.5:
            tree.insert(sequences(rng, page))
        elif action < 0.7:
            tree.match(sequences(rng, page))
        elif action < 0.85 and len(locks) < 4:
            length, node = tree.match(sequences(rng, page))
            if length:
                locks.append((node, tree.cache.inc_lock_ref(node)))
        elif locks:
            node, receipt = locks.pop(rng.randrange(len(locks)))
            tree.cache.dec_lock_ref(node, receipt.to_dec_params())
        if step == 250:
            for node, receipt in locks:
                tree.cache.dec_lock_ref(node, receipt.to_dec_params())
            locks.clear()
            tree.cache.reset()
            tree.slots.clear()
            tree.rows.mamba_allocator.clear()
        tree.check()
    assert tree.coordinator is not None
    assert tree.coordinator.account.counts["states_evicted"] > 20, "nothing was evicted, so nothing was tested"


def test_as_many_states_leave_as_an_allocation_asks_for_where_most_are_inside_the_tree() -> None:
    tree, tokens = Tree("forecast", tokens=1024, states=12), list(range(1, 91))
    for length in range(10, 91, 10):
        assert tree.insert(tokens[:length])
    before, _ = tree.held()
    tree.evict(0, 6)
    left, _ = tree.held()
    assert before == 9
    assert left <= 3
    tree.check()


@pytest.mark.parametrize("policy", ["forecast", "marconi-online"])
def test_the_victim_is_the_lowest_score_of_all(policy: str) -> None:
    """The indices are fed only what changed; their victim equals scoring every candidate of the tree anew."""
    rng, tree = random.Random(1), Tree(policy, tokens=2048, states=16, more_pools=(PoolKind.BYTES,))
    compared = 0
    for _ in range(300):
        tree.clock.advance(rng.uniform(0, 20))
        tree.insert(sequences(rng, 1))
        compared += len(compare_victims(tree))
    assert compared > 300


def test_everything_can_be_freed() -> None:
    rng, tree = random.Random(2), Tree("forecast")
    for _ in range(60):
        tree.insert(sequences(rng, 1))
    tree.evict(tree.slots.size, tree.rows.mamba_allocator.size)
    tree.check()
    assert tree.held() == (0, 0)


@pytest.mark.parametrize("core", ["rust", "python"])
def test_lru_is_stock(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with recency, every match and every policy is that of SGLang's own components, on either core."""
    if core == "rust" and compat.engine_version() == "0.5.17":
        pytest.skip("this version has one core")
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    stock = Tree(None, tokens=1024, states=8)
    assert type(stock.core).__name__ == ("RustUnifiedTreeCore" if core == "rust" else "UnifiedTreeCore")
    ours, rng = Tree("lru", tokens=1024, states=8), random.Random(3)
    probes = [sequences(random.Random(i), 1) for i in range(40)]
    for step in range(300):
        tokens, look = sequences(rng, 1), rng.random() < 0.4
        results = [tree.match(tokens)[0] if look else tree.insert(tokens) for tree in (stock, ours)]
        assert results[0] == results[1]
        assert stock.held() == ours.held()
        if step % 20 == 0:
            assert [stock.match(probe)[0] for probe in probes] == [ours.match(probe)[0] for probe in probes]
    assert ours.coordinator is not None
    assert ours.coordinator.account.counts["states_evicted"] > 50


def test_what_others_share_is_not_superseded_by_the_turn_behind_it() -> None:
    """A state on the grid can stand for the end of a prompt and for the system prompt that others begin with."""
    tree = Tree("forecast", tokens=4096, page_size=64)
    coordinator, words = tree.coordinator, random.Random(5).sample(range(3, 4000), 600)
    assert coordinator is not None
    system, prompts = words[:128], [words[:128] + words[128 + 40 * i : 168 + 40 * i] for i in range(3)]

    def asks(name: str, prompt: list[int], start: int) -> Tracked:
        tree.clock.advance(1.0)
        record = Tracked(matched=tree.match(prompt)[1])
        record.request = coordinator.decisions.arrive(name, np.array(prompt, np.int32), tree.clock.now(), start, start)
        coordinator._use(record, record.request)
        return record

    def saves(record: Tracked, tokens: list[int]) -> Any:
        tree.insert(tokens)
        node = tree.core._node_arena[tree.match(tokens)[1]]
        assert record.request is not None
        coordinator.saved(node, record.request.tip, record)
        return node

    first = asks("first", prompts[0], 0)
    shared = saves(first, system)
    assert shared.hybrid_mark.kind is Kind.FRESH
    asks("second", prompts[1], 128)
    assert shared.hybrid_mark.kind is Kind.BRANCH
    saves(first, prompts[0] + words[300:324])  # its answer is there
    assert shared.hybrid_mark.kind is Kind.BRANCH
    tree.evict(0, 1)
    assert tree.match(prompts[2] + [1])[0] == 128, "the system prompt is worth more than one conversation"
    tree.check()


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_guard_learns_what_is_saved_what_has_to_leave_and_that_all_is_gone(page_size: int) -> None:
    """The hot prompt is saved and used, cold ones push it out of a cache whose order is the worst there is."""
    tree = Tree("forecast", tokens=2048, states=8, page_size=page_size)
    coordinator, rng = tree.coordinator, random.Random(7)
    assert coordinator is not None
    guard = coordinator.decisions.guard
    assert guard is not None

    def serves(name: str, prompt: list[int]) -> Any:
        tree.clock.advance(1.0)
        start, matched = tree.match(prompt[:-1])
        record = Tracked(matched=matched)
        req = SimpleNamespace(
            rid=name, origin_input_ids=prompt, return_logprob=False, sampling_params=SimpleNamespace()
        )
        coordinator._arrive(req, record, start)
        tree.insert(prompt)
        node = tree.core._node_arena[tree.match(prompt)[1]]
        assert record.request is not None
        coordinator.saved(node, record.request.tip, record)
        coordinator.decisions.computed(name)
        return node

    prompts = [rng.sample(range(3, 4000), 192) for _ in range(20)]
    for number, prompt in enumerate(prompts):
        serves(f"cold {number}", prompt)
        assert guard.shadow.tree.states <= tree.held()[0]
        assert guard.shadow.tree.kv_tokens - tree.held()[1] <= number + 1  # the namespace's token of each
        coordinator.decisions.check()
    assert coordinator.account.counts["states_evicted"] > 5
    last = prompts[-1] + rng.sample(range(3, 4000), 64)
    key = coordinator.decisions.namespaces.keyed(np.array(last), None)
    assert guard.shadow.tree.match(key, 200).resume_tokens == 193
    used = serves("again", last)
    assert used.hybrid_mark.touch == coordinator.decisions._uses
    tree.cache.reset()
    tree.slots.clear()
    tree.rows.mamba_allocator.clear()
    serves("after a flush", prompts[-1])
    assert (guard.shadow.tree.states, guard.owed) == (1, 0)
    tree.check()


def test_a_request_that_begins_again_in_an_emptied_cache_is_known_there() -> None:
    """Weights are loaded in a pause: what ran was retracted, the cache emptied, and who ran begins anew."""
    tree, rng = Tree("forecast", tokens=2048, states=8), random.Random(9)
    coordinator = tree.coordinator
    assert coordinator is not None
    decisions, guard = coordinator.decisions, coordinator.decisions.guard
    assert guard is not None
    prompt, other = (rng.sample(range(3, 4000), 192) for _ in range(2))
    record = Tracked()

    def arrives(name: str, tokens: list[int], record: Tracked) -> None:
        tree.clock.advance(1.0)
        req = SimpleNamespace(
            rid=name, origin_input_ids=tokens, return_logprob=False, sampling_params=SimpleNamespace()
        )
        coordinator._arrive(req, record, 0)

    def saves(tokens: list[int]) -> Any:
        tree.insert(tokens)
        node = tree.core._node_arena[tree.match(tokens)[1]]
        assert record.request is not None
        coordinator.saved(node, record.request.tip, record)
        return node

    arrives("runs", prompt, record)
    saves(prompt)
    tree.cache.reset()
    tree.slots.clear()
    tree.rows.mamba_allocator.clear()
    arrives("runs", prompt, record)  # it was retracted
    assert coordinator.cached_tokens(record) == 0, "what it had saved is gone"
    new = saves(prompt)
    arrives("comes after that", other, Tracked())
    assert record.request is not None
    assert decisions._placed[record.request.tip] == (new, 192)
    assert {id(node) for node, _ in decisions._placed.values()} == {id(new)}, "an old tree is held"
    assert guard.shadow.tree.states == 1
    tree.check()
