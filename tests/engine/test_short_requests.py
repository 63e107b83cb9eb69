"""What a request asks of the cache and of the rows in short: the same as SGLang's, and what is evicted ahead."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.components import AHEAD
from tests.engine.tree import Tree

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::Warning:sglang"),
    pytest.mark.skipif(compat.engine_version() != compat.PRIMARY, reason="other versions keep their walks"),
]


def request(name: str) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(name, "", array("q", [1, 2, 3]), SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize("page", [1, 64])
def test_rows_are_what_sglang_takes(page: int) -> None:
    """Batches of one and of several, some with a state already (page 64: with track buffers)."""
    pools, rng = [Tree(kind, states=40, page_size=page).rows for kind in ("forecast", None)], random.Random(3)
    assert [type(pool).__name__ for pool in pools] == ["ShortRows", "HybridReqToTokenPool"]
    running: list[tuple[Any, Any]] = []
    for step in range(120):
        if running and rng.random() < 0.4:
            both = running.pop(rng.randrange(len(running)))
            for pool, req in zip(pools, both, strict=True):
                pool.free_mamba_cache(req)
                pool.free(req)
            continue
        batch = [(request(f"{step}.{n}"), request(f"{step}.{n}")) for n in range(1 if rng.random() < 0.7 else 2)]
        matched = rng.random() < 0.3
        if len(running) + len(batch) > 8:
            continue
        for pool, reqs in zip(pools, zip(*batch, strict=True), strict=True):
            for req in reqs if matched else ():
                req.kv.mamba_pool_idx, req.kv.mamba_needs_clear = pool.mamba_allocator.alloc(1)[0], False
        taken = [pool.alloc(list(reqs)) for pool, reqs in zip(pools, zip(*batch, strict=True), strict=True)]
        assert taken[0] == taken[1]
        for ours, theirs in batch:
            for name in ("req_pool_idx", "mamba_pool_idx", "mamba_needs_clear", "mamba_next_track_idx"):
                assert getattr(ours.kv, name) == getattr(theirs.kv, name), name
            for req in (ours, theirs):
                req.kv.kv_allocated_len = 3
        running += batch
        for name in ("req_index_to_mamba_index_mapping", "req_generation"):
            assert torch.equal(getattr(pools[0], name)[1:], getattr(pools[1], name)[1:]), name
        if page > 1:
            buffers = [pool.req_index_to_mamba_ping_pong_track_buffer_mapping[1:] for pool in pools]
            assert torch.equal(*buffers)
        assert pools[0].mamba_allocator.available_size() == pools[1].mamba_allocator.available_size()
    for pool in pools:
        assert pool.alloc([request(str(n)) for n in range(9)]) is None


@pytest.mark.parametrize(("eviction", "spare"), [("forecast", 1024 // AHEAD), ("lru", 0)])
def test_a_walk_evicts_a_little_ahead(eviction: str, spare: int) -> None:
    """As long as the order is ours; leaves of eight tokens each."""
    tree = Tree(eviction, tokens=1024, states=200)
    for number in range(100):
        tree.clock.advance(1.0)
        assert tree.insert([1000 + number] * 8)
    free = tree.slots.available_size()
    tree.evict(8, 0)
    assert tree.slots.available_size() == free + (8 if not spare else 16)
    tree.check()


def test_nothing_is_evicted_ahead_where_kinds_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a walk may end before it evicted what it was asked for, so it goes leaf by leaf."""
    tree = Tree("forecast", tokens=1024, states=200)
    monkeypatch.setattr(tree.slots, "mamba_full_cache_donor", lambda: object())
    for number in range(100):
        tree.clock.advance(1.0)
        assert tree.insert([1000 + number] * 8)
    free = tree.slots.available_size()
    tree.evict(8, 0)
    assert tree.slots.available_size() == free + 8
    tree.check()
