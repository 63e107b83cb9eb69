"""SGLang 0.5.21's tree core with its walks made short, for a tree of KV and states that lies on the device alone.

A request of a hundred tokens takes most of a millisecond of cache calls, and most of that are questions that have one
answer here: which layers a component frees, whether a node is backed up, whether every component accepts it. The
answers are written out, to the same effect (tests/engine/test_short_walks.py); where there is a host tier or a session
radix cache, SGLang's own walks run. And what a request holds is not looked for (`append`).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult, IncLockRefResult, InsertResult, MatchResult
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, get_and_increase_time_counter

from sglang_hybrid.engine.cache.components import TYPES
from sglang_hybrid.engine.cache.leaves import LeafSets
from sglang_hybrid.engine.cache.short_eviction import ShortEviction
from sglang_hybrid.engine.cache.victims import end_tokens

_KV, _STATE = TYPES["kv"], TYPES["state"]


class ShortWalks(ShortEviction, LeafSets, UnifiedTreeCore):  # type: ignore[misc]
    """Matches, locks, insertions and evictions of `HybridFull` and `HybridMamba`."""

    @property
    def plain(self) -> bool:
        """Whether there is nothing but KV and states on the device."""
        tiers = self.enable_hicache or self.enable_storage or self.enable_external_cache_linker
        return not tiers and not self.enable_session_radix_cache and len(self.components) == 2

    def append(self, params: Any, node_id: Any) -> tuple[Any, InsertResult, list[Any]] | None:
        """Insert what a request computed as one leaf below the node its match ended in; None where more is to be done.

        All the steps of SGLang's walk at once, for most insertions are no more than that. Returns the leaf, the result
        and what the cache is to do then.
        """
        key, value, tokens = params.key, params.value, params.prev_prefix_len
        node = self._node_arena.get(node_id)
        if node is None or end_tokens(node) != tokens or not tokens < len(key) == len(value):
            return None
        if tokens and node.key.token_ids[-1] != key.token_ids[tokens - 1]:
            return None
        if params.rotation_base is not None or key.is_bigram or len(key) % self.page_size:
            return None
        if key.child_key_at(tokens, self.page_size) in node.children:
            return None
        priority, counts = params.priority or 0, not (params.chunked or self.is_write_back)
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        for on_way in reversed(path):
            on_way.last_access_time = get_and_increase_time_counter()
            on_way.priority = max(on_way.priority, priority)
            on_way.hit_count += counts and on_way is not self.root_node
        leaf = self._add_new_node(
            node, key[tokens:], value[tokens:], priority=priority, session_id=params.session_id
        )  # fmt: skip
        ranges: Any = {} if params.track_adopted_ranges else None
        result = InsertResult(prefix_len=tokens, last_device_node=leaf.id, adopted_ranges=ranges)
        result.record_adopted_range(_KV, tokens, len(key))
        actions: list[Any] = []
        for component in self.components:
            component.commit_insert_component_data(
                node=leaf, is_new_leaf=True, params=params, result=result, cache_actions=actions
            )
        leaf.hit_count += counts
        return leaf, result, actions

    def _match_prefix_helper(self, key: Any) -> Any:
        if not self.plain:
            return super()._match_prefix_helper(key)
        values: list[Any] = []
        size, page, at, held, action = len(key), self.page_size, 0, 0, None
        node = best = self.root_node
        while at < size:
            child = node.children.get(key.child_key_at(at, page))
            if child is None or child.component_data[_KV].value is None:
                break
            same = child.key.match_at(key, at, page_size=page)
            at += same
            if same < len(child.key):
                node, action = self._split_node(child.key, child, same)  # its upper part has no state
                values.append(node.component_data[_KV].value)
                break
            node, data = child, child.component_data
            values.append(data[_KV].value)
            if data[_STATE].value is not None:
                best, held = node, len(values)
        return values, best, best, held, at, action

    def _match_post_processor(
        self, params: Any, value: list[Any], best: Any, best_device: Any, held: int, known: int, action: Any
    ) -> Any:
        if not self.plain:
            return super()._match_post_processor(params, value, best, best_device, held, known, action)
        indices = torch.cat(value[:held]) if held else self._empty_match_result.device_indices
        return self._found(params, indices, best, known, action)

    def _found(self, params: Any, indices: Any, best: Any, known: int, action: Any) -> Any:
        """The result of a match that restarts at `best`, whose path has the KV `indices`, of `known` tokens in all."""
        if best.component_data[_STATE].value is not None:
            self.lru_lists[_STATE].reset_node_mru(best)
        node, used = best, get_and_increase_time_counter()
        while node is not None:
            node.last_access_time = used
            used -= 0.00001
            node = node.parent
        return MatchResult(
            device_indices=indices,
            last_device_node=best.id,
            last_host_node=best.id,
            best_match_node=best.id,
            mamba_branching_seqlen=self.components_by_type[_STATE].noted(params, best.id, indices.numel(), known),
            full_kv_hit_length=known,
            cache_actions=[] if action is None else [action],
        )

    def lower_lock(self, leaf: Any, receipt: Any, skipped: tuple[Any, ...]) -> None:
        """Who holds the path to the parent of `leaf`, which it just appended, holds that to the leaf from now on.

        As if the one had been unlocked and the other locked, without the state if that is `skipped`.
        """
        node = leaf.parent
        self._assert_receipt_anchor(node, receipt)
        if node is not self.root_node:
            self.components_by_type[_KV].touched(node)
            if _STATE not in receipt.skipped_lock_components:
                self._unlock_state(node)
        kv = leaf.component_data[_KV]
        kv.lock_ref += 1
        self._protect(_KV, kv.value.numel())
        self.evictable_device_leaves.discard(leaf)
        if _STATE not in skipped:
            self._lock_state(leaf)

    def _lock_state(self, node: Any) -> None:
        data = node.component_data[_STATE]
        if data.lock_ref == 0 and data.value is not None:
            self._protect(_STATE, data.value.numel())
        data.lock_ref += 1

    def _unlock_state(self, node: Any) -> None:
        data = node.component_data[_STATE]
        assert data.lock_ref > 0, f"the state of node {node.id} is not locked"
        data.lock_ref -= 1
        if data.lock_ref == 0 and data.value is not None:
            self._protect(_STATE, -data.value.numel())

    def inc_lock_ref(self, node_id: Any, skip_lock_components: Any = ()) -> Any:
        if not self.plain:
            return super().inc_lock_ref(node_id, skip_lock_components)
        node, skipped = self._node_arena[node_id], tuple(skip_lock_components)
        result = IncLockRefResult(delta=0, node_id=node.id, skipped_lock_components=skipped)
        if node is self.root_node:
            return result
        result.delta = self._lock_path(node)
        if _STATE not in skipped:
            self._lock_state(node)
        return result

    def _lock_path(self, node: Any) -> int:
        """Lock the KV of the path to `node`; returns how many tokens were not before."""
        locked, leaves = 0, self.evictable_device_leaves
        while node is not self.root_node:
            data = node.component_data[_KV]
            if data.lock_ref == 0:
                locked += data.value.numel()
            data.lock_ref += 1
            leaves.discard(node)
            node = node.parent
        self._protect(_KV, locked)
        return locked

    def _protect(self, kind: Any, amount: int) -> None:
        self.component_evictable_size_[kind] -= amount
        self.component_protected_size_[kind] += amount

    def dec_lock_ref(self, node_id: Any, params: Any, skip_swa: bool = False) -> Any:
        if not self.plain or skip_swa:
            return super().dec_lock_ref(node_id, params, skip_swa)
        node = self._node_arena[node_id]
        self._assert_receipt_anchor(node, params)
        if node is self.root_node:
            return DecLockRefResult()
        self.components_by_type[_KV].touched(node)
        if _STATE not in params.skipped_lock_components:
            self._unlock_state(node)
        freed = 0
        while node is not self.root_node:
            data = node.component_data[_KV]
            assert data.lock_ref > 0, f"the KV of node {node.id} is not locked"
            data.lock_ref -= 1
            if data.lock_ref == 0:
                freed += data.value.numel()
                if not node.children:
                    self._update_evictable_leaf_sets(node)
            node = node.parent
        self._protect(_KV, -freed)
        return DecLockRefResult()
