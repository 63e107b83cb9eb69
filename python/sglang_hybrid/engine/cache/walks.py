"""SGLang 0.5.21's tree core with its walks made short, for a tree of KV and states that lies on the device alone.

A request of a hundred tokens takes most of a millisecond of cache calls, and most of that are questions that have one
answer here: which layers a component frees, whether a node is backed up, whether every component accepts it. The
answers are written out, to the same effect (tests/engine/test_short_walks.py); where there is a host tier or a session
radix cache, SGLang's own walks run. And what a request holds is not looked for: an insertion starts where its match
ended, and what was just inserted is matched where it ended.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult, IncLockRefResult, MatchResult
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, get_and_increase_time_counter
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceLeafResult,
    EvictDeviceNextNodeResult,
)

from sglang_hybrid.engine.cache.components import TYPES
from sglang_hybrid.engine.cache.leaves import LeafSets
from sglang_hybrid.engine.cache.victims import end_tokens

_KV, _STATE = TYPES["kv"], TYPES["state"]


class ShortWalks(LeafSets, UnifiedTreeCore):  # type: ignore[misc]
    """Matches, locks, insertions and evictions of `HybridFull` and `HybridMamba`."""

    _inserted: tuple[Any, Any] = None, None  # the key that was inserted last and the node at its end
    _end: Any = None  # the node at the end of the key that is matched, where it is known
    _held: tuple[Any, int] | None = None  # a node, and its depth, on the way of the key that is inserted

    @property
    def _plain(self) -> bool:
        """Whether there is nothing but KV and states on the device."""
        tiers = self.enable_hicache or self.enable_storage or self.enable_external_cache_linker
        return not tiers and not self.enable_session_radix_cache and len(self.components) == 2

    def begin_insert(self, params: Any) -> Any:
        self._held = getattr(params, "hybrid_held", None)
        step = super().begin_insert(params)
        self._held, done = None, step.result
        if done is not None and not done.rotation_tail_declined:
            self._inserted = params.key, self._node_arena[done.last_device_node]
        return step

    def _advance_insert(self) -> Any:
        held, self._held = self._held, None
        if held is not None and self._plain:
            self._skip(self._ongoing_insert_walk_state, *held)
        return super()._advance_insert()

    def _skip(self, walk: Any, node_id: Any, tokens: int) -> None:
        """Go at once to where the match of the same request ended: it has held the path since, `tokens` deep.

        What the walk does to a node that is on the device, and whose KV is the request's own, is done here.
        """
        node, key = self._node_arena.get(node_id), walk.key
        if node is None or node is self.root_node or not end_tokens(node) == tokens <= len(key):
            return
        if tokens > walk.params.prev_prefix_len or node.key.token_ids[-1] != key.token_ids[tokens - 1] or key.is_bigram:
            return
        path, counts = [node], not (walk.params.chunked or self.is_write_back)
        while path[-1].parent is not self.root_node:
            path.append(path[-1].parent)
        for on_way in reversed(path):
            on_way.last_access_time = get_and_increase_time_counter()
            on_way.priority = max(on_way.priority, walk.priority)
            on_way.hit_count += counts
        walk.node, walk.total_prefix_length = node, tokens
        walk.key, walk.value = key[tokens:], walk.value[tokens:]

    def match_prefix(self, params: Any) -> Any:
        (inserted, node), self._inserted = self._inserted, (None, None)
        if params.key is inserted and self._plain and self._node_arena.get(node.id) is node:
            self._end = node if node.component_data[_STATE].value is not None else None
        return super().match_prefix(params)

    def _match_prefix_helper(self, key: Any) -> Any:
        end, self._end = self._end, None
        if not self._plain:
            return super()._match_prefix_helper(key)
        values: list[Any] = []
        if end is not None:
            node = end
            while node.parent is not None:
                values.append(node.component_data[_KV].value)
                node = node.parent
            values.reverse()
            return values, end, end, len(values), len(key), None
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
        if not self._plain:
            return super()._match_post_processor(params, value, best, best_device, held, known, action)
        if best.component_data[_STATE].value is not None:
            self.lru_lists[_STATE].reset_node_mru(best)
        node, used = best, get_and_increase_time_counter()
        while node is not None:
            node.last_access_time = used
            used -= 0.00001
            node = node.parent
        states = self.components_by_type[_STATE]
        grid = states.mamba_checkpoint_grid
        branch = known // grid * grid
        indices = torch.cat(value[:held]) if held else self._empty_match_result.device_indices
        result = MatchResult(
            device_indices=indices,
            last_device_node=best.id,
            last_host_node=best.id,
            best_match_node=best.id,
            mamba_branching_seqlen=branch if branch > indices.numel() else None,
            full_kv_hit_length=known,
            cache_actions=[] if action is None else [action],
        )
        return states.noted(result, params)

    def inc_lock_ref(self, node_id: Any, skip_lock_components: Any = ()) -> Any:
        if not self._plain:
            return super().inc_lock_ref(node_id, skip_lock_components)
        node, skipped = self._node_arena[node_id], tuple(skip_lock_components)
        result = IncLockRefResult(delta=0, node_id=node.id, skipped_lock_components=skipped)
        if node is self.root_node:
            return result
        result.delta = self._lock_path(node)
        data = node.component_data[_STATE]
        if _STATE not in skipped:
            if data.lock_ref == 0 and data.value is not None:
                self._protect(_STATE, data.value.numel())
            data.lock_ref += 1
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
        if not self._plain or skip_swa:
            return super().dec_lock_ref(node_id, params, skip_swa)
        node = self._node_arena[node_id]
        self._assert_receipt_anchor(node, params)
        if node is self.root_node:
            return DecLockRefResult()
        self.components_by_type[_KV].touched(node)
        data = node.component_data[_STATE]
        if _STATE not in params.skipped_lock_components:
            assert data.lock_ref > 0, f"the state of node {node.id} is not locked"
            data.lock_ref -= 1
            if data.lock_ref == 0 and data.value is not None:
                self._protect(_STATE, -data.value.numel())
        freed = 0
        while node is not self.root_node:
            data = node.component_data[_KV]
            assert data.lock_ref > 0, f"the KV of node {node.id} is not locked"
            data.lock_ref -= 1
            if data.lock_ref == 0:
                freed += data.value.numel()
                self._update_evictable_leaf_sets(node)
            node = node.parent
        self._protect(_KV, -freed)
        return DecLockRefResult()

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        """All the leaves that go, one after the other, in a single step; anything else is SGLang's step."""
        if self._plain:
            component, result = self.components_by_type[component_type], EvictDeviceNextNodeResult(made_progress=True)
            gone, done = result.tracker, tracker[component_type]
            while (leaf := component.next_leaf(done + gone[component_type])) is not None:
                self._evict_leaf(leaf, result)
                if not component.counts_alone:
                    break
            if gone[component_type]:
                return result
        return super().evict_device_next_node(component_type, tracker)

    def evict_device_leaf(self, node_id: Any, is_write_back: bool) -> Any:
        if not self._plain or is_write_back:
            return super().evict_device_leaf(node_id, is_write_back)
        result, node = EvictDeviceLeafResult(), self._node_arena[node_id]
        assert node in self.evictable_device_leaves, f"node {node_id} is no leaf that can be evicted"
        self._evict_leaf(node, result)
        return result

    def _evict_leaf(self, node: Any, result: Any) -> None:
        """Take a leaf out of the tree and add what it frees to `result`."""
        self.kv_events.record_remove(node)
        data = node.component_data
        kv, state = data[_KV], data[_STATE]
        for component in self.components:
            component.leaf_goes(node)
        tokens = kv.value.numel()
        result.device_frees[_KV].append(kv.value)
        result.tracker[_KV] += tokens
        result.unbacked_tokens += tokens
        self.component_evictable_size_[_KV] -= tokens
        if state.value is not None:
            result.device_frees[_STATE].append(state.value)
            result.tracker[_STATE] += state.value.numel()
            self.component_evictable_size_[_STATE] -= state.value.numel()
            self.lru_lists[_STATE].remove_node(node)
            state.value = None
        self.evictable_device_leaves.discard(node)
        self._remove_leaf_from_parent(node)
        if node.parent is not self.root_node:
            self._update_evictable_leaf_sets(node.parent)
