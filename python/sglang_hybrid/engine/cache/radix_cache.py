"""MambaRadixCache: SGLang's unified radix cache with our components, the same class in every version."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.engine.cache.components import TYPES, HybridFull, HybridMamba
from sglang_hybrid.engine.cache.driver import Driver
from sglang_hybrid.engine.hicache.components import TieredFull, TieredMamba

TREE_CORE = "hybrid"
"""The name of our tree core in SGLang's registry, which a cache can choose from 0.5.21 on."""


class MambaRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """SGLang's cache, tree and locks; which state is saved and what is evicted is decided by `driver`."""

    def __init__(self, params: Any, make_driver: Callable[[Any], Driver]) -> None:
        """`make_driver` gets this cache before SGLang has built its tree, and only keeps it."""
        self.driver = driver = make_driver(self)
        full, mamba = (HybridFull, HybridMamba) if driver.tier is None else (TieredFull, TieredMamba)
        params.component_registry_override = {
            **(params.component_registry_override or {}),
            TYPES["kv"]: partial(full, driver),
            TYPES["state"]: partial(mamba, driver),
        }
        if getattr(params, "tree_core_backend", TREE_CORE) is None:
            _register_tree_core()
            params.tree_core_backend = TREE_CORE
        super().__init__(params)


def create(ctx: Any, make_driver: Callable[[Any], Driver]) -> MambaRadixCache:
    """Build the cache of one scheduler process from SGLang's TreeCacheBuildContext, with its host tier if any."""
    from sglang.srt.mem_cache import registry

    if hasattr(registry, "create_unified_radix_cache"):
        return registry.create_unified_radix_cache(ctx, cache_class=partial(MambaRadixCache, make_driver=make_driver))
    params = ctx.params  # 0.5.17
    params.tree_components = (TYPES["kv"], *([TYPES["window"]] if ctx.is_hybrid_swa else []), TYPES["state"])
    cache = MambaRadixCache(params, make_driver)
    if ctx.enable_hierarchical_cache:
        cache.init_hicache(ctx.server_args, params)
        ctx.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)
    return cache


@cache
def _register_tree_core() -> None:
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend

    from sglang_hybrid.engine.cache.tree_core import BatchEviction

    register_tree_core_backend(TREE_CORE, BatchEviction)
