"""Which nodes are leaves that can be evicted: asked about a path at every lock, insertion and eviction."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache.components import TYPES

_KV = TYPES["kv"]


class LeafSets:
    """Mixed into SGLang's tree core: the same answer, found with fewer questions where the KV is on the device."""

    def _update_evictable_leaf_sets(self: Any, node: Any) -> None:
        data = node.component_data
        if node.parent is None or data[_KV].value is None:
            super()._update_evictable_leaf_sets(node)  # type: ignore[misc]
            return
        self.evictable_host_leaves.discard(node)  # it is on the device
        for child in node.children.values():
            if child.component_data[_KV].value is not None:
                self.evictable_device_leaves.discard(node)
                return
        for component in data:
            if component.lock_ref > 0:
                self.evictable_device_leaves.discard(node)
                return
        self.evictable_device_leaves.add(node)
