"""SGLang's tree core, evicting all victims of a shortage in one step.

SGLang's cache frees memory after every victim, and stops as soon as the shortage is over. One step for all of them
frees once, and can evict ahead (`prefix.pools.AHEAD`): the next few requests then find memory.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import EvictDeviceNextNodeResult


class BatchEviction(UnifiedTreeCore):  # type: ignore[misc]
    """Every step of it is one of SGLang's: the components name the victims, SGLang's core evicts them."""

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        """Evict until the component names no further victim, or one victim where that may end the shortage."""
        component = self.components_by_type[component_type]
        if not component.batches:
            return super().evict_device_next_node(component_type, tracker)
        result, done = EvictDeviceNextNodeResult(), dict(tracker)
        while True:
            step = super().evict_device_next_node(component_type, done)
            _move(step, result, done)
            if step.node_id is not None:
                _move(self.evict_device_leaf(step.node_id, False), result, done)
            elif not step.tracker:
                break
            if component.satisfied(done):  # all that a further step would say
                break
        for kind, values in result.device_frees.items():
            if len(values) > 1:  # SGLang frees them one by one
                result.device_frees[kind] = [torch.cat(values)]
        result.made_progress = bool(result.tracker)
        return result


def _move(step: Any, result: Any, done: dict[Any, int]) -> None:
    """Add what `step` evicted to `result` and to the counts `done`; what it frees leaves it, as SGLang checks."""
    for kind, values in step.device_frees.items():
        result.device_frees[kind].extend(values)
    step.device_frees.clear()
    for kind, count in step.tracker.items():
        result.tracker[kind] += count
        done[kind] = done.get(kind, 0) + count
    result.unbacked_tokens += step.unbacked_tokens
    if hasattr(step, "cache_actions"):  # 0.5.23
        result.cache_actions.extend(step.cache_actions)
        step.cache_actions.clear()
