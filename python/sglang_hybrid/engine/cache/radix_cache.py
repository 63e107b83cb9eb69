"""MambaRadixCache: SGLang's unified radix cache with our components, the same class in every version."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.engine.cache.components import TYPES, HybridFull, HybridMamba
from sglang_hybrid.engine.cache.coordinator import CacheCoordinator
from sglang_hybrid.engine.hicache.components import TieredFull, TieredMamba

TREE_CORE = "hybrid"
"""The name of our tree core in SGLang's registry, which a cache can choose from 0.5.21 on."""


class MambaRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """SGLang's cache, tree and locks; which state is saved and what is evicted is decided by `coordinator`."""

    def __init__(self, params: Any, make_coordinator: Callable[[Any], CacheCoordinator]) -> None:
        """`make_coordinator` gets this cache before SGLang has built its tree, and only keeps it."""
        self.coordinator = coordinator = make_coordinator(self)
        full, mamba = (HybridFull, HybridMamba) if coordinator.tier is None else (TieredFull, TieredMamba)
        params.component_registry_override = {
            **(params.component_registry_override or {}),
            TYPES["kv"]: partial(full, coordinator),
            TYPES["state"]: partial(mamba, coordinator),
        }
        if getattr(params, "tree_core_backend", TREE_CORE) is None:
            _register_tree_core()
            params.tree_core_backend = TREE_CORE
        super().__init__(params)

    def match_prefix(self, params: Any) -> Any:
        """The longest cached prefix; of a prompt that marks segments, along the cheapest way to compose it."""
        composer = self.coordinator.composer
        if composer is None or params.req is None:
            return super().match_prefix(params)
        return composer.match(params, super().match_prefix)

    def insert(self, params: Any) -> Any:
        """Insert what a request computed; a composed prompt under its own key."""
        plan, composer = getattr(params, "hybrid", None), self.coordinator.composer
        if composer is not None and plan is not None:
            composer.rekey(plan.record, params)
        return super().insert(params)

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        """Evict what an allocation is short of. 0.5.23 asks KV for every leaf then, and stops when enough has left."""
        quotas = kwargs.get("allocation_reclaim_satisfied") is not None
        self.coordinator.short_tokens = 0 if quotas else int(params.num_tokens)
        try:
            return self._completed(super().evict_for_alloc, params, **kwargs)
        finally:
            self.coordinator.short_tokens = 0

    def evict(self, params: Any) -> Any:
        """Evict; in 0.5.17 this is what an allocation asks for."""
        if hasattr(UnifiedRadixCache, "evict_for_alloc"):
            return super().evict(params)
        return self._completed(super().evict, params)

    def _completed(self, evict: Callable[..., Any], params: Any, **kwargs: Any) -> Any:
        """What `evict` says; where the tree could not give enough, `memory` knows of more."""
        memory = self.coordinator.memory
        tokens = int(self.token_to_kv_pool_allocator.available_size() + params.num_tokens)
        states = int(memory.states.available_size() + params.mamba_num)
        result = evict(params, **kwargs)
        memory.complete(tokens, states)
        return result

    def reset(self) -> None:
        """Empty the cache, and forget segments with it: the weights they were computed with may have changed."""
        self.coordinator.victims.forget()
        super().reset()
        if self.coordinator.composer is not None:
            self.coordinator.composer.clear()

    def take_events(self) -> Any:
        """What happened since the last call, for readers of KV events."""
        if self.coordinator.events is not None:
            self.coordinator.events.retell()
        return super().take_events()


def create(ctx: Any, make_coordinator: Callable[[Any], CacheCoordinator]) -> MambaRadixCache:
    """Build the cache of one scheduler process from SGLang's TreeCacheBuildContext, with its host tier if any."""
    from sglang.srt.mem_cache import registry

    if hasattr(registry, "create_unified_radix_cache"):
        return registry.create_unified_radix_cache(
            ctx, cache_class=partial(MambaRadixCache, make_coordinator=make_coordinator)
        )
    params = ctx.params  # 0.5.17
    params.tree_components = (TYPES["kv"], *([TYPES["window"]] if ctx.is_hybrid_swa else []), TYPES["state"])
    return MambaRadixCache(params, make_coordinator)


@cache
def _register_tree_core() -> None:
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend

    from sglang_hybrid.engine.cache.tree_core import BatchEviction

    register_tree_core_backend(TREE_CORE, BatchEviction)
