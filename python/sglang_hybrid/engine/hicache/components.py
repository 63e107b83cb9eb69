"""The components of a cache with a host tier behind it: they see what happens in either tier, and order both.

Another version than `compat.COMPLETE` has other signatures: it is refused (`checks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_hybrid.engine.cache.components import HybridFull, HybridMamba, _Ordered


class _Tiered(_Ordered):
    """What both components do about the host tier."""

    def commit_hicache_transfer(self, node: Any, phase: Any, transfers: Any = (), **kwargs: Any) -> Any:
        for transfer in transfers:
            for node_id in transfer.nodes_to_load or ():
                self._touch(self.tree_core.node_by_id(node_id))
        return super().commit_hicache_transfer(node, phase, transfers, **kwargs)

    def drive_host_eviction(self, num_tokens: int, tracker: Any, *frees: Any, **told: Any) -> None:
        if self.coordinator.tier is not None and self._scored(self.tree_core):
            self.coordinator.tier.evict(self.coordinator, self, self._pool, num_tokens, tracker, *frees, **told)
        if tracker[self.component_type] < num_tokens:  # by age, what has no price
            super().drive_host_eviction(num_tokens, tracker, *frees, **told)


class TieredFull(_Tiered, HybridFull):
    """KV of two tiers. Evicted nodes hang below those on the device, and a lock reaches up through them."""

    def acquire_component_lock(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._touch(node)
        self._touch_above(node)
        return super().acquire_component_lock(node, *args, **kwargs)

    def release_component_lock(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._touch_above(node)
        return super().release_component_lock(node, *args, **kwargs)

    def commit_hicache_transfer(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._touch_above(node)
        return super().commit_hicache_transfer(node, *args, **kwargs)

    def _touch_parent(self, node: Any) -> None:
        self._touch(node.parent)  # how many of its children are on the device is another question

    def _touch_above(self, node: Any) -> None:
        """`node` is in the host tier: the first of its ancestors on the device may be a leaf there, or no longer."""
        while node.parent is not None and node.component_data[self.component_type].value is None:
            node = node.parent
            self._touch(node)


class TieredMamba(_Tiered, HybridMamba):
    """States of two tiers: one is lost to requests when it left both."""

    def evict_component(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        data = node.component_data[self.component_type]
        hosted = data.value is None and data.host_value is not None
        with self._told_of(node):
            result = super().evict_component(node, *args, **kwargs)
        if hosted and data.host_value is None:
            self._touch(node)
            self.coordinator.victims.touch_below(node)
            self.coordinator.lost(node)
        return result

    def commit_hicache_transfer(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        inserted = getattr(kwargs.get("insert_result"), "inserted_host_node", None)  # what storage gave back
        with self._told_of(node if inserted is None else self.tree_core.node_by_id(inserted)):
            return super().commit_hicache_transfer(node, *args, **kwargs)

    @contextmanager
    def _told_of(self, node: Any) -> Iterator[None]:
        """Readers of events hear where the state of `node` comes and goes inside."""
        events = self.coordinator.events
        before = () if events is None else events.media(node)
        yield
        if events is not None:
            events.moved(node, before)

    def recover_after_unevict(self, node: Any, *args: Any, **kwargs: Any) -> None:
        self._touch(node)  # its KV was computed again
        self._touch(node.parent)
        super().recover_after_unevict(node, *args, **kwargs)

    def finalize_load_back(self, req: Any, prep: Any, success: bool) -> None:
        super().finalize_load_back(req, prep, success)
        if not success and req is not None and self.coordinator.tier is not None:
            self.coordinator.tier.resume_on_device(req)
