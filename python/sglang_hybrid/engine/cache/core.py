"""Our cores of SGLang's unified tree, through its registry (from 0.5.21 on): the same tree, asked fewer questions."""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_hybrid.engine import compat

BACKEND = "hybrid"


def choose(params: Any) -> None:
    """Let the cache that is made of `params` have our core, unless another one is asked for or none can be (0.5.17)."""
    if getattr(params, "tree_core_backend", BACKEND) is None:
        _register()
        params.tree_core_backend = BACKEND


def shorten(cache: Any) -> Any:
    """`cache`, which SGLang made with our core, as a MambaRadixCache over short rows.

    SGLang's factories know only classes of its own; ours add methods and hold nothing. Subclasses are left alone.
    """
    if compat.engine_version() == compat.PRIMARY:
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sglang_hybrid.engine.cache.radix import MambaRadixCache
        from sglang_hybrid.engine.cache.rows import ShortRows
        from sglang_hybrid.engine.cache.walks import ShortWalks

        rows = cache.req_to_token_pool
        if type(cache) is UnifiedRadixCache and isinstance(cache.tree_core, ShortWalks):
            cache.__class__ = MambaRadixCache
            if type(rows) is HybridReqToTokenPool:
                rows.__class__ = ShortRows
    return cache


@cache
def _register() -> None:
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend

    if compat.engine_version() == compat.PRIMARY:
        from sglang_hybrid.engine.cache.walks import ShortWalks as Core
    else:
        from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

        from sglang_hybrid.engine.cache.leaves import LeafSets

        class Core(LeafSets, UnifiedTreeCore):  # type: ignore[misc, no-redef]
            """The walks of other versions have another shape."""

    register_tree_core_backend(BACKEND, Core)
