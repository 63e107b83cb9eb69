"""The prefix cache of a server that decodes: KV alone.

The state of a prompt always comes with the transfer, so a server that decodes resumes where its KV ends, and what it
keeps needs no state. SGLang builds the cache of a server that prefills here: it reuses KV up to a saved state and then
copies that state, which the transfer overwrites; and it keeps a prompt only once its answer has passed a position at
which a state is saved. This tree has SGLang's component for KV, and none for states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class KvCache(UnifiedRadixCache):  # type: ignore[misc]
    """SGLang's radix cache of KV, before pools of a hybrid model."""

    def supports_mamba(self) -> bool:
        """Yes: states are this cache's to give back, so SGLang compares their pool as well whenever it is idle."""
        return True

    def on_release(self, req: Any, *, inserted: bool) -> None:
        """`req` gives its memory back: its state too, which no node of the tree holds."""
        super().on_release(req, inserted=inserted)
        if req.kv.holds_mamba:
            self.req_to_token_pool.free_mamba_cache(req)


def create(ctx: Any) -> Any:
    """Build the cache of one scheduler process from SGLang's TreeCacheBuildContext."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(dataclasses.replace(ctx, is_hybrid_ssm=False), cache_class=KvCache)


def uncounted(_: None, queue: Any, decode_req: Any) -> None:
    """After SGLang took what was handed over: KV that is reused here was computed where the prompt was.

    SGLang adds what it reuses beyond the tokens that the other server had cached to those.
    """
    if isinstance(queue.tree_cache, KvCache):
        req = decode_req.req
        req.already_computed = max(req.already_computed, len(req.prefix_indices))
