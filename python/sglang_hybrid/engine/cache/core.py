"""SGLang's Python tree core with one step made shorter, through its registry of cores (from 0.5.21 on).

Every lock, insertion and eviction asks for the nodes of a path whether they are leaves now. The answer is the same,
found with fewer questions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_hybrid.engine.cache.components import TYPES

BACKEND = "hybrid"
_KV = TYPES["kv"]


def choose(params: Any) -> None:
    """Let the cache that is made of `params` have our core, unless another one is asked for or none can be (0.5.17)."""
    if getattr(params, "tree_core_backend", BACKEND) is None:
        _register()
        params.tree_core_backend = BACKEND


@cache
def _register() -> None:
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    class HybridTreeCore(UnifiedTreeCore):  # type: ignore[misc]
        """The core of a cache with our components."""

        def _update_evictable_leaf_sets(self, node: Any) -> None:
            data = node.component_data
            if node.parent is None or data[_KV].value is None:
                super()._update_evictable_leaf_sets(node)
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

    register_tree_core_backend(BACKEND, HybridTreeCore)
