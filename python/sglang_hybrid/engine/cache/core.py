"""SGLang's Python tree core with two steps made shorter, through its registry of cores (from 0.5.21 on).

Every lock, insertion and eviction asks the nodes of a path whether they are leaves now; and a prompt that was inserted
is matched at once, to find the node that was just made (spared in 0.5.21 alone: the walk has another shape in 0.5.23).
The answers are the same, found with fewer questions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.components import TYPES

BACKEND = "hybrid"
_KV, _STATE = TYPES["kv"], TYPES["state"]


def choose(params: Any) -> None:
    """Let the cache that is made of `params` have our core, unless another one is asked for or none can be (0.5.17)."""
    if getattr(params, "tree_core_backend", BACKEND) is None:
        _register()
        params.tree_core_backend = BACKEND


@cache
def _register() -> None:
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    remembers = compat.engine_version() == compat.PRIMARY

    class HybridTreeCore(UnifiedTreeCore):  # type: ignore[misc]
        """The core of a cache with our components."""

        _inserted: tuple[Any, Any] = None, None  # the key that was inserted last and the node at its end
        _end: Any = None  # the node at the end of the key that is matched, where it is known

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

        def begin_insert(self, params: Any) -> Any:
            step = super().begin_insert(params)
            done = step.result
            if remembers and done is not None and not done.rotation_tail_declined and len(self.components) == 2:
                self._inserted = params.key, self._node_arena[done.last_device_node]
            return step

        def match_prefix(self, params: Any) -> Any:
            (inserted, node), self._inserted = self._inserted, (None, None)
            if params.key is inserted and not self.enable_hicache and self._node_arena.get(node.id) is node:
                self._end = node if node.component_data[_STATE].value is not None else None
            return super().match_prefix(params)

        def _match_prefix_helper(self, key: Any, *args: Any) -> Any:
            end, self._end = self._end, None
            if end is None:
                return super()._match_prefix_helper(key, *args)
            values, node = [], end
            while node.parent is not None:
                values.append(node.component_data[_KV].value)
                node = node.parent
            values.reverse()
            return values, end, end, len(values), len(key), None

    register_tree_core_backend(BACKEND, HybridTreeCore)
