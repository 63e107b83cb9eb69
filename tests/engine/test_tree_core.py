"""Our tree core beside SGLang's, under the same components: after every step both trees are the same throughout."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.prefix.pools import AHEAD
from tests.engine.tree import Tree

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::Warning:sglang"),
    pytest.mark.skipif(compat.engine_version() == "0.5.17", reason="a cache of this version cannot choose its core"),
]


def pair(policy: str, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> list[Tree]:
    """A tree with our core and one with SGLang's, which does not evict ahead."""
    from sglang_hybrid.engine.cache import components

    monkeypatch.setattr(components, "AHEAD", 1 << 30)
    trees = [Tree(policy, **sizes), Tree(policy, core="python", **sizes)]
    assert [type(tree.core).__name__ for tree in trees] == ["BatchEviction", "UnifiedTreeCore"]
    return trees


def picture(tree: Tree) -> dict[str, Any]:
    """All there is to a tree, without the ids of its nodes."""
    inner, types = tree.core, tree.types
    names: dict[Any, tuple[int, ...]] = {inner.root_node: ()}
    stack = [inner.root_node]
    while stack:
        node = stack.pop()
        for child in node.children.values():
            names[child] = names[node] + tuple(child.key.token_ids)
            stack.append(child)
    assert len(names) == len(inner._node_arena)
    nodes = {
        name: (
            [(None if d.value is None else len(d.value), d.lock_ref) for d in node.component_data],
            node.hit_count,
            node.priority,
            node in inner.evictable_device_leaves,
            node in inner.evictable_host_leaves,
        )
        for node, name in names.items()
    }
    lru, recent = inner.lru_lists[types["state"]], []
    at = lru.head.lru_next[lru._pt]
    while at is not lru.tail:
        recent.append(names[at])
        at = at.lru_next[lru._pt]
    return {
        "nodes": nodes,
        "states, most recent first": recent,
        "by last access": [names[node] for node in sorted(names, key=lambda n: n.last_access_time)],
        "evictable": inner.component_evictable_size_,
        "protected": inner.component_protected_size_,
        "free": (tree.slots.available_size(), tree.rows.mamba_allocator.available_size()),
    }


@dataclass
class Running:
    """One request under way in a tree, and the answer it will have."""

    req: Any
    answer: list[int]


def begin(tree: Tree, name: str, prompt: list[int], answer: list[int]) -> Running | None:
    """Match, lock, allocate, plan and prefill; None where memory could not be had."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocation import alloc_req_slots, alloc_token_slots
    from sglang.srt.sampling.sampling_params import SamplingParams

    coordinator = tree.coordinator
    assert coordinator is not None
    req = Req(name, "", array("q", prompt), SamplingParams(max_new_tokens=len(answer)))
    req.init_next_round_input(tree.cache)
    need = 2 * len(prompt) - len(req.prefix_indices) + len(answer)
    if (
        not coordinator.memory.room_for(SimpleNamespace(can_run_list=[]), req)
        or tree.slots.available_size() + tree.cache.full_evictable_size() < need
    ):
        coordinator.memory.let_go(req)
        return None
    req.lock_receipt = tree.cache.inc_lock_ref(req.last_node).to_dec_params()
    start, end = len(req.prefix_indices), len(prompt)
    req.set_extend_range(start, end)
    (row,) = alloc_req_slots(tree.rows, [req], tree.cache)
    tree.rows.write((row, slice(0, start)), req.prefix_indices)
    tree.rows.write((row, slice(start, end)), alloc_token_slots(tree.cache, end - start))
    req.kv.kv_allocated_len = req.kv.kv_committed_len = end
    coordinator.plan(SimpleNamespace(reqs=[req], prefix_lens=[start], extend_lens=[end - start]))
    for checkpoint in req.sglang_hybrid.planned:
        checkpoint.written = True
    tree.cache.cache_unfinished_req(req)
    return Running(req, answer)


def end(tree: Tree, running: Running) -> None:
    """Decode the answer and release the request."""
    from sglang.srt.mem_cache.allocation import alloc_token_slots
    from sglang.srt.mem_cache.common import release_kv_cache

    req, size = running.req, len(running.req.origin_input_ids)
    req.output_ids.extend(running.answer)
    whole = size + len(running.answer)
    tree.rows.write((req.kv.req_pool_idx, slice(size, whole)), alloc_token_slots(tree.cache, whole - size))
    req.kv.kv_allocated_len = req.kv.kv_committed_len = whole
    release_kv_cache(req, tree.cache)


@pytest.mark.skipif(compat.engine_version() != compat.PRIMARY, reason="written as this version's scheduler calls")
@pytest.mark.parametrize("policy", ["forecast", "lru"])
def test_whole_requests_leave_the_same_tree(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that share, continue and overlap while KV and states are short."""
    trees, rng = pair(policy, monkeypatch, tokens=1200, states=16), random.Random(7)
    said: list[list[int]] = [[rng.randrange(3, 40) for _ in range(60)] for _ in range(3)]
    running: list[tuple[Running, ...]] = []
    done = 0
    for step in range(250):
        for tree in trees:
            tree.clock.advance(0.5)
        if running and (len(running) == 3 or rng.random() < 0.5):
            request = running.pop(rng.randrange(len(running)))
            for tree, part in zip(trees, request, strict=True):
                end(tree, part)
            said.append([*request[0].req.origin_input_ids, *request[0].answer])
            done += 1
        else:
            known = rng.choice(said[:3] + said[-6:])
            prompt = known[: rng.randint(1, len(known))] if rng.random() < 0.3 else known
            prompt = prompt[:150] + [rng.randrange(3, 40) for _ in range(rng.randint(1, 40))]
            answer = [rng.randrange(3, 40) for _ in range(rng.randint(1, 12))]
            begun = [begin(tree, str(step), prompt, answer) for tree in trees]
            assert (begun[0] is None) == (begun[1] is None)
            if begun[0] is not None and begun[1] is not None:
                running.append((begun[0], begun[1]))
        assert picture(trees[0]) == picture(trees[1]), f"step {step}"
    assert done > 80
    ours, theirs = (tree.coordinator for tree in trees)
    assert ours is not None
    assert theirs is not None
    assert ours.account.counts["states_evicted"] > 50
    assert ours.account.counts == theirs.account.counts


@pytest.mark.parametrize(("policy", "page"), [("forecast", 1), ("lru", 1), ("marconi-online", 64)])
def test_inserting_matching_and_evicting_leave_the_same_tree(
    policy: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees, rng = pair(policy, monkeypatch, tokens=1024 * page, states=12, page_size=page), random.Random(8)
    held: list[tuple[Any, ...]] = []
    for step in range(300):
        tokens = [token for _ in range(rng.randint(1, 7)) for token in [rng.randrange(2)] * 16 * page]
        tokens += [rng.randrange(9) for _ in range(rng.randrange(2) * page)]
        what = rng.random()
        for tree in trees:
            tree.clock.advance(1.0)
        if what < 0.4:
            assert len({tree.insert(tokens) for tree in trees}) == 1
        elif what < 0.6:
            ours, theirs = (tree.found(tree.key(tokens)) for tree in trees)
            for name in ("mamba_branching_seqlen", "full_kv_hit_length", "host_hit_length", "mamba_host_hit_length"):
                assert getattr(ours, name) == getattr(theirs, name), name
            assert len({tree.match(tokens)[0] for tree in trees}) == 1
        elif what < 0.75 and len(held) < 4:
            nodes = [tree.match(tokens)[1] for tree in trees]
            receipts = [tree.cache.inc_lock_ref(node) for tree, node in zip(trees, nodes, strict=True)]
            assert receipts[0].delta == receipts[1].delta
            held.append(tuple(zip(nodes, receipts, strict=True)))
        elif held:
            for tree, (node, receipt) in zip(trees, held.pop(rng.randrange(len(held))), strict=True):
                tree.cache.dec_lock_ref(node, receipt.to_dec_params())
        if step % 7 == 0:
            amount = rng.randrange(200) * page, rng.randrange(3)
            for tree in trees:
                tree.evict(*amount)
        assert picture(trees[0]) == picture(trees[1]), f"step {step}"
        if not held:
            for tree in trees:
                tree.cache.sanity_check()


@pytest.mark.parametrize(("policy", "spare"), [("forecast", 1024 // AHEAD), ("lru", 0)])
def test_an_eviction_frees_a_little_ahead(policy: str, spare: int) -> None:
    """As long as the order is ours; leaves of eight tokens each."""
    tree = Tree(policy, tokens=1024, states=200)
    for number in range(100):
        tree.clock.advance(1.0)
        assert tree.insert([1000 + number] * 8)
    free = tree.slots.available_size()
    tree.evict(8, 0)
    assert tree.slots.available_size() == free + (8 if not spare else 16)
    tree.check()


@pytest.mark.parametrize(("policy", "left"), [("forecast", 10), ("lru", 2)])
def test_an_allocation_evicts_what_it_is_short_of(policy: str, left: int) -> None:
    """0.5.23 asks for all leaves then, of eight tokens here, and looks after every step whether enough has left."""
    from sglang.srt.mem_cache.allocation import alloc_token_slots

    tree = Tree(policy, tokens=1024, states=200)
    number = 0
    while tree.slots.available_size() >= 8:
        tree.clock.advance(1.0)
        number += 1
        assert tree.insert([1000 + number] * 8)
    free = tree.slots.available_size()
    taken = alloc_token_slots(tree.cache, free + 22)  # three leaves, and a fourth ahead
    assert tree.slots.available_size() == left
    tree.slots.free(taken)
    tree.check()


def test_nothing_is_evicted_ahead_where_kinds_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortage may end before everything that was asked for is evicted, so victims go one by one."""
    tree = Tree("forecast", tokens=1024, states=200)
    monkeypatch.setattr(tree.slots, "mamba_full_cache_donor", lambda: object())
    for number in range(100):
        tree.clock.advance(1.0)
        assert tree.insert([1000 + number] * 8)
    free = tree.slots.available_size()
    tree.evict(8, 0)
    assert tree.slots.available_size() == free + 8
    tree.check()
