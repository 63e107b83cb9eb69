"""The evictions of SGLang 0.5.21's tree core made short: see `walks`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceLeafResult,
    EvictDeviceNextNodeResult,
)

from sglang_hybrid.engine.cache.components import TYPES

_KV, _STATE = TYPES["kv"], TYPES["state"]


class ShortEviction:
    """Mixed into SGLang's tree core, where it is `plain`: KV and states on the device alone."""

    def evict_device_next_node(self: Any, component_type: Any, tracker: Any) -> Any:
        """What has a price goes by that; anything else is SGLang's step."""
        if self.plain:
            result = EvictDeviceNextNodeResult(made_progress=True)
            if self.evict_by_score(self.components_by_type[component_type], tracker[component_type], result):
                return result
        return super().evict_device_next_node(component_type, tracker)

    def evict_by_score(self, component: Any, done: int, result: Any) -> bool:
        """Evict one victim after the other, or a single one where memory is shared; whether there was any.

        `done` went before in the same walk. `result` gets what is to be freed, one tensor of each kind.
        """
        gone, kind, leaves = result.tracker, component.component_type, self.evictable_device_leaves
        one = not component.counts_alone
        while (node := component.next_victim(done + gone[kind])) is not None:
            if node in leaves:
                self._evict_leaf(node, result)
            else:  # a state, of a node that stays
                component.state_goes(node)
                self._evict_state(node, result)
            if one:
                break
        for freed, values in result.device_frees.items():  # SGLang frees them one by one
            result.device_frees[freed] = [torch.cat(values)] if len(values) > 1 else values
        return bool(gone[kind])

    def evict_device_leaf(self, node_id: Any, is_write_back: bool) -> Any:
        if not self.plain or is_write_back:
            return super().evict_device_leaf(node_id, is_write_back)
        result, node = EvictDeviceLeafResult(), self._node_arena[node_id]
        assert node in self.evictable_device_leaves, f"node {node_id} is no leaf that can be evicted"
        self._evict_leaf(node, result)
        return result

    def _evict_leaf(self, node: Any, result: Any) -> None:
        """Take a leaf out of the tree and add what it frees to `result`."""
        self.kv_events.record_remove(node)
        kv = node.component_data[_KV].value
        for component in self.components:
            component.leaf_goes(node)
        tokens = kv.numel()
        result.device_frees[_KV].append(kv)
        result.tracker[_KV] += tokens
        result.unbacked_tokens += tokens
        self.component_evictable_size_[_KV] -= tokens
        if node.component_data[_STATE].value is not None:
            self._evict_state(node, result)
        self.evictable_device_leaves.discard(node)
        parent = node.parent
        del parent.children[node.key.child_key(self.page_size)]
        self._unregister_node(node)
        if parent is not self.root_node and not parent.children:
            self._update_evictable_leaf_sets(parent)

    def _evict_state(self, node: Any, result: Any) -> None:
        """Take the state of `node` and add it to what `result` frees."""
        data = node.component_data[_STATE]
        result.device_frees[_STATE].append(data.value)
        result.tracker[_STATE] += data.value.numel()
        self.component_evictable_size_[_STATE] -= data.value.numel()
        self.lru_lists[_STATE].remove_node(node)
        data.value = None
