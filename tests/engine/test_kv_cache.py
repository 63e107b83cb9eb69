"""The cache of a server that decodes, over SGLang's real tree, pools and requests: KV alone, and no state for it."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.engine import compat
from tests.engine.tree import Tree

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::Warning:sglang"),
    pytest.mark.skipif(compat.engine_version() != compat.PRIMARY, reason="other versions have our cache there too"),
]


class Decoding:
    """A request as a server that decodes has it: its prompt is handed over behind what the cache has, then it grows."""

    def __init__(self, tree: Tree, name: str, prompt: list[int]) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.managers.schedule_policy import match_prefix_for_req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.tree = tree
        self.req = req = Req(name, "", array("q", prompt), SamplingParams(max_new_tokens=64), vocab_size=4096)
        found = match_prefix_for_req(tree.cache, req, req.origin_input_ids, cow_mamba=True, include_req=True)
        req.lock_receipt = tree.cache.inc_lock_ref(found.last_device_node).to_dec_params()
        self.hit = len(found.device_indices)
        assert tree.rows.alloc([req]) is not None
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(prompt)
        tree.rows.write((req.kv.req_pool_idx, slice(0, self.hit)), found.device_indices)
        self.hold(self.hit, len(prompt))
        req.kv.cache_protected_len = self.hit
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.set_extend_range(self.hit, len(prompt))

    def hold(self, start: int, end: int) -> None:
        """KV for the tokens from `start` to `end`, whole pages at a time."""
        row, page = self.req.kv.req_pool_idx, self.tree.page_size
        held = -(-start // page) * page
        if end > held:
            slots = self.tree.slots.alloc(-(-(end - held) // page) * page)
            assert slots is not None
            self.tree.rows.write((row, slice(held, end)), slots[: end - held].to(torch.int32))

    def begin(self) -> None:
        """The prompt has arrived."""
        self.req.output_ids.append(7)
        self.tree.cache.cache_unfinished_req(self.req)

    def decode(self, tokens: list[int]) -> None:
        req = self.req
        before = req.kv.kv_committed_len
        req.output_ids.extend(tokens)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = before + len(tokens)
        self.hold(before, before + len(tokens))

    def end(self, keep: bool = True) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(self.req, self.tree.cache, is_insert=keep)

    def row(self, tokens: int) -> list[int]:
        return [int(at) for at in self.tree.rows.req_to_token[self.req.kv.req_pool_idx, :tokens]]


def prompt(rng: random.Random, page: int) -> list[int]:
    tokens: list[int] = []
    for depth in range(rng.randint(1, 4)):
        tokens += [rng.choice((1, 1, 2)) + 10 * depth] * rng.choice((page, 2 * page, 3))
    return tokens


def check(tree: Tree, running: list[Decoding]) -> None:
    """Every page and every slot is free, in the tree, or held by one request."""
    held, tokens = tree.held()
    assert held == 0, "no node has a state"
    page = tree.page_size
    own = sum(
        -(-each.req.kv.kv_allocated_len // page) * page - each.req.kv.cache_protected_len // page * page
        for each in running
    )
    assert tokens + own + tree.slots.available_size() == tree.slots.size
    states = tree.rows.mamba_allocator
    each = 1 if page == 1 else 1 + tree.rows.mamba_ping_pong_track_buffer_size
    assert states.available_size() == states.size - each * len(running)
    tree.cache.sanity_check()


@pytest.mark.parametrize("page", [1, 64])
def test_random_requests_leave_nothing_behind(page: int) -> None:
    rng, tree = random.Random(page), Tree("kv", tokens=4096, states=40, page_size=page)
    running: list[Decoding] = []
    hits = 0
    for step in range(250):
        if rng.random() < 0.5 and len(running) < 6:
            tokens = prompt(rng, page)
            need = len(tokens) + 6 * page + 64
            if tree.slots.available_size() < need:
                tree.evict(need - tree.slots.available_size(), 0)
            one = Decoding(tree, str(step), tokens)
            hits += one.hit > 0
            if rng.random() < 0.8:  # else its transfer fails
                one.begin()
                running.append(one)
            else:
                one.end(keep=False)
        elif running:
            one = running[rng.randrange(len(running))]
            if rng.random() < 0.5:
                one.decode([rng.randrange(3, 60) for _ in range(rng.randint(1, 9))])
            else:
                running.remove(one)
                one.end(keep=rng.random() < 0.8)
        check(tree, running)
    for one in running:
        one.end()
    check(tree, [])
    assert hits > 50
    tree.evict(4096, 0)
    assert tree.held() == (0, 0)
    assert tree.slots.available_size() == tree.slots.size


@pytest.mark.parametrize("page", [1, 64])
def test_a_prompt_is_there_for_the_next_one_from_its_arrival_on(page: int) -> None:
    """No state, no answer of a certain length: the KV that arrived is what the next prompt has not to be sent."""
    tree = Tree("kv", tokens=4096, states=24, page_size=page)
    shared = [5, 6] * 100
    first = Decoding(tree, "first", [*shared, 8, 9])
    assert first.hit == 0
    first.begin()
    second = Decoding(tree, "second", [*shared, 10])
    whole = len(shared) // page * page
    assert second.hit == whole
    assert second.row(whole) == first.row(whole), "the same pages"
    second.begin()
    answer = [11] * 150
    first.decode(answer)
    first.end()
    third = Decoding(tree, "third", [*shared, 8, 9, 7, *answer[:-1], 12])
    assert third.hit == (len(shared) + 2 + len(answer)) // page * page, "of the answer too, without a state at its end"
    for one in (second, third):
        one.end(keep=False)
    check(tree, [])


def test_what_is_reused_here_is_not_counted_as_cached_where_the_prompt_was_computed() -> None:
    from sglang_hybrid.engine.pairs import kv_cache

    cache = Tree("kv").cache
    req = SimpleNamespace(already_computed=64, prefix_indices=torch.zeros(100))
    decode_req: Any = SimpleNamespace(req=req)
    kv_cache.uncounted(None, SimpleNamespace(tree_cache=object()), decode_req)
    assert req.already_computed == 64, "SGLang's own cache"
    kv_cache.uncounted(None, SimpleNamespace(tree_cache=cache), decode_req)
    assert req.already_computed == 100
