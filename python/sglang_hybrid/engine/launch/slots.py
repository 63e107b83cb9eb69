"""State slots of a running request: how many SGLang counts on, and whether the state of its prompt stays locked."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.prefix import policies

UNLOCK = "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK"
"""SGLang's setting, in 0.5.17 to 0.5.23: while a request decodes, the cached state of its prompt can be evicted."""


def environment(config: HybridConfig) -> dict[str, str]:
    """Environment variables to set where the user set none.

    A decoding request works on a copy of the cached state of its prompt and never reads that state again, so a state
    that is worth more to others may take its slot. Under a stock policy requests are locked as by SGLang's default.
    """
    return {} if config.backend != "hybrid" or policies.find(config.policy).stock else {UNLOCK: "1"}


def per_request(strategy: str, overlap: bool) -> int:
    """Slots that SGLang counts on for each running request: `KVCacheConfigurator._calculate_mamba_ratio`."""
    if strategy not in ("extra_buffer", "extra_buffer_lazy"):
        return 3
    buffers = 2 if overlap and strategy == "extra_buffer" else 1
    return 2 + buffers + (not unlocked())


def per_request_of(namespace: Any) -> int:
    """The same for SGLang's final arguments."""
    if namespace.disable_radix_cache:
        return 1
    return per_request(namespace.mamba_radix_cache_strategy, not namespace.disable_overlap_schedule)


def unlocked() -> bool:
    """As SGLang reads its setting."""
    from sglang.srt.environ import envs

    return bool(getattr(envs, UNLOCK).get())
