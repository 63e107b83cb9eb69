"""Resuming a request from a tree with a host tier, as the scheduler does, over contents that can be told apart."""

from __future__ import annotations

import zlib
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.tree import Tree


def fingerprints(tokens: list[int]) -> Any:
    """A number for each of `tokens` that float32 holds exactly and that depends on it and all before it."""
    sums = accumulate(tokens, lambda before, token: zlib.crc32(token.to_bytes(8, "little"), before), initial=0)
    return torch.tensor([float(value & 0xFFFFF) for value in sums][1:])


class TieredTree(Tree):
    """KV and states hold the fingerprint of the tokens up to theirs, so that a restored one can be judged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: list[tuple[Any, Any, Any]] = []

    def insert(self, tokens: list[int], **more: Any) -> bool:
        if not self.make_room(len(tokens)):
            return False
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        value, state = self.slots.alloc(len(tokens)), self.rows.mamba_allocator.alloc(1)
        marks = fingerprints(tokens)
        self.kv.k_buffer[0][value] = marks[:, None, None]
        self.kv.v_buffer[0][value] = -marks[:, None, None]
        for pool in self.pools():
            pool[:, state] = float(marks[-1])
        done = self.cache.insert(InsertParams(key=self.key(tokens), value=value, mamba_value=state, **more))
        if done.mamba_exist:
            self.rows.mamba_allocator.free(state)
        elif self.coordinator is not None:
            node = self.core.node_by_id(done.last_device_node)
            self.coordinator.tier.saved(node)
        return True

    def pools(self) -> list[Any]:
        """The tensors of a state, [layers, slots, ...]."""
        held = self.rows.mamba_pool.mamba_cache
        return [*held.conv, held.temporal]

    def step(self) -> None:
        """Between two passes: copies that ended are taken note of, those that SGLang left out begin."""
        if self.coordinator is not None:
            self.coordinator.tier.back_up()
        self.cache.check_hicache_events()

    def resume(self, tokens: list[int], runs: bool = False) -> tuple[int, int]:
        """Match, load back and judge what a request for `tokens` would start from: its length, of it from the host.

        With `runs` it keeps its state and the lock on its prefix until `end`.
        """
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams

        kv = ReqKvInfo()
        req: Any = SimpleNamespace(kv=kv, session=None, swa_host_hit_length=0)
        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens), req=req, cow_mamba=True))
        req.last_node, req.best_match_node = found.last_device_node, found.best_match_node
        req.host_hit_length, req.mamba_host_hit_length = found.host_hit_length, found.mamba_host_hit_length
        loaded, node = 0, req.last_node
        if self.coordinator is not None:
            self.coordinator.tier.secure(self.coordinator.memory, req)
        if req.host_hit_length or req.mamba_host_hit_length:
            receipt = self.cache.inc_lock_ref(req.last_node)
            more, node = self.cache.init_load_back(
                InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
            )
            loaded = more if isinstance(more, int) else len(more)  # from 0.5.22 the number, before it their places
            self.cache.ready_to_load_host_cache()
            self.cache.dec_lock_ref(req.last_node, receipt.to_dec_params())
        prefix = self.core.collect_full_device_indices(node, self.core.root_node.id)
        self._judge(tokens[: len(prefix)], prefix, kv)
        self.running.append((kv, node, self.cache.inc_lock_ref(node)))
        if not runs:
            self.end(-1)
        self.cache.check_hicache_events()
        return len(prefix), loaded

    def end(self, which: int) -> None:
        """A running request ends."""
        kv, node, receipt = self.running.pop(which)
        self.cache.dec_lock_ref(node, receipt.to_dec_params())
        if kv.mamba_pool_idx is not None:
            self.rows.mamba_allocator.free(kv.mamba_pool_idx.view(-1))

    def held(self) -> tuple[int, int]:
        states, tokens = super().held()
        return states + sum(kv.mamba_pool_idx is not None for kv, _, _ in self.running), tokens

    def _judge(self, tokens: list[int], prefix: Any, kv: Any) -> None:
        marks = fingerprints(tokens)
        assert torch.equal(self.kv.k_buffer[0][prefix][:, 0, 0], marks)
        assert torch.equal(self.kv.v_buffer[0][prefix], -marks[:, None, None].expand(-1, 1, 4))
        if not tokens:
            assert kv.mamba_cow_src_index is None
            return
        source = kv.mamba_cow_src_index if kv.mamba_cow_src_index is not None else kv.mamba_pool_idx
        assert source is not None, "a request behind a prefix has a state"
        for pool in self.pools():
            assert bool((pool[:, source] == float(marks[-1])).all())
