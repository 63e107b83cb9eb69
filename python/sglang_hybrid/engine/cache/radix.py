"""MambaRadixCache: SGLang's unified radix cache, with short forms of what the scheduler asks it for every request."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import EvictDeviceNextNodeResult
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.engine.cache.components import TYPES
from sglang_hybrid.engine.cache.requests import streams

_STATE = TYPES["state"]


class MambaRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """A cache whose tree core is `ShortWalks`."""

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        """Insert what a prefill pass of `req` computed, and hold it.

        Most passes append one leaf below what their request holds. Then the row of the request says already what the
        tree says, and its lock moves down to the leaf: nothing is matched, written or locked anew.
        """
        core = self.tree_core
        if not self._short or streams(req):
            super().cache_unfinished_req(req, chunked=chunked, **kwargs)
            return
        row, params, result, leaf = self._insert(req, req.get_fill_ids(), chunked, False)
        req.prefix_indices = row
        if result is not None and not result.rotation_tail_declined:
            skipped = (_STATE,) if envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get() else ()
            if leaf is None:
                self._rematch(req, params.key, row, skipped)
            else:
                core.lower_lock(leaf, req.lock_receipt, skipped)
                req.last_node, req.kv.cache_protected_len = leaf.id, len(params.key)
                req.lock_receipt = DecLockRefParams(node_id=leaf.id, skipped_lock_components=skipped)
            req.swa_prefix_lock_released = False
        self.components[_STATE].cleanup_after_caching_req(
            req, is_finished=False, insert_result=result, insert_params=params
        )

    def insert_req(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the first `up_to` tokens of `req`, which ended; what lies behind them in its row the caller frees."""
        if not self._short:
            super().insert_req(req, up_to=up_to, **kwargs)
            return
        tokens = (req.origin_input_ids + req.output_ids)[:up_to]
        _, params, result, _ = self._insert(req, tokens, False, True)
        if result is not None and not result.rotation_tail_declined:
            req.kv.cache_protected_len = max(req.kv.cache_protected_len, len(params.key))
        self.components[_STATE].cleanup_after_caching_req(
            req, is_finished=True, insert_result=result, insert_params=params
        )

    @property
    def _short(self) -> bool:
        return not self.disable and self.tree_core.plain and not self.tree_core.is_eagle

    def _insert(self, req: Any, tokens: Any, chunked: bool, ended: bool) -> tuple[torch.Tensor, InsertParams, Any, Any]:
        """Insert as much of `tokens` as there is a state for: the KV of all, what was asked, its result, its leaf.

        Without anything to insert there is no result; without a leaf, the insertion was more than one.
        """
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(tokens)].to(torch.int64, copy=True)
        params = InsertParams(
            prev_prefix_len=req.kv.cache_protected_len,
            chunked=chunked,
            priority=req.priority or 0,
            session_id=req.session_id,
            rotation_base=req.kv_rotation_base,
        )
        length = self.components[_STATE].prepare_for_caching_req(
            req=req, insert_params=params, token_ids_len=len(tokens), is_finished=ended
        )
        if not (length or ended):
            return row, params, None, None
        tokens = tokens if length == len(tokens) else tokens[:length]
        key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt).page_aligned(self.page_size)
        params.key, params.value = key, row if len(key) == len(row) else row[: len(key)]
        appended = self.tree_core.append(params, req.last_node)
        if appended is None:
            return row, params, self.insert(params), None
        leaf, result, actions = appended
        self._apply_cache_actions(actions)
        return row, params, result, leaf

    def _rematch(self, req: Any, key: Any, row: torch.Tensor, skipped: tuple[Any, ...]) -> None:
        """Let `req` use and hold what the tree has of `key`: somebody else may have inserted it before."""
        held = req.kv.cache_protected_len
        found = self.match_prefix(MatchPrefixParams(key=key, req=req))
        indices = found.device_indices
        size = len(indices)
        assert held <= size + self.page_size - 1, f"request {req.rid} held {held} tokens, the tree has {size}"
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(held, size)), indices[held:])
        self.dec_lock_ref(req.last_node, req.lock_receipt, skip_swa=req.swa_prefix_lock_released)
        req.lock_receipt = self.inc_lock_ref(found.last_device_node, skip_lock_components=skipped).to_dec_params()
        req.prefix_indices = torch.cat([indices, row[size:]]) if size < len(row) else indices
        req.last_node, req.kv.cache_protected_len = found.last_device_node, size

    def _evict_components(self, wanted: Any, tracker: Any, available_size_targets: Any = None) -> None:
        """What has a price goes in one step for each kind; SGLang's walk for what is missing then."""
        core = self.tree_core
        if core.plain:
            for kind, component in self.components.items():
                if tracker[kind] < wanted[kind] and component.counts_alone:
                    core.evict_device_start(kind, wanted[kind])
                    try:
                        self._evict_by_score(component, tracker)
                    finally:
                        core.evict_device_end(kind)
        if any(tracker[kind] < wanted[kind] for kind in tracker):
            super()._evict_components(wanted, tracker, available_size_targets)

    def _evict_by_score(self, component: Any, tracker: Any) -> None:
        result = EvictDeviceNextNodeResult()
        self.tree_core.evict_by_score(component, tracker[component.component_type], result)
        for kind in list(result.device_frees):
            tracker[kind] += result.tracker[kind]
            for value in result.device_frees.pop(kind):
                if kind is _STATE:
                    self.components[_STATE]._free_mamba_value(value)
                else:
                    self.token_to_kv_pool_allocator.free_segment(value, start_pos=0)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Free parts of a row; after an insertion there is mostly nothing left to free."""
        ranges = [(start, end) for start, end in ranges if start < end]
        if ranges:
            super().free_kv_row(kv, ranges)
