"""What is hooked and replaced of SGLang's hierarchical cache; 0.5.17 has it elsewhere."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import SCHEDULER, Hook, Replaced
from sglang_hybrid.engine.surface.scheduler import UPDATER

HOST_POOLS = "srt.mem_cache.pool_host."
"""Pools in host memory."""
_CONTROLLER = "srt.managers.cache_controller:HiCacheController."

HICACHE: tuple[Hook, ...] = (
    Hook(
        HOST_POOLS + "common:_cuda_host_register",
        "REPLACE",
        "hicache.copies:without_registration",
        SCHEDULER,
        "cpu",
        since="0.5.21",
    ),
    *(
        Hook(
            f"{HOST_POOLS}{pool}.get_dummy_flat_data_page",
            "AROUND",
            "cpu.pinning:without_pinning",
            SCHEDULER,
            "cpu",
            since="0.5.21",
        )
        for pool in ("mha:MHATokenToKVPoolHost", "mla:MLATokenToKVPoolHost", "mamba:MambaPoolHost")
    ),
    Hook(UPDATER + "_observe_weight_load", "BEFORE", "hicache.storage:weights_change", SCHEDULER, since="0.5.21"),
    Hook(_CONTROLLER + "_generate_storage_config", "AFTER", "hicache.storage:name", SCHEDULER, since="0.5.21"),
    Hook(_CONTROLLER + "attach_storage_backend", "AFTER", "hicache.storage:guard", SCHEDULER, since="0.5.21"),
)

HICACHE_REPLACED: tuple[Replaced, ...] = (
    # These pools import what copies for them on other platforms only.
    *(
        Replaced(f"{HOST_POOLS}{pool}:{name}", f"hicache.copies:{ours}", SCHEDULER, "cpu", since="0.5.21", absent=True)
        for pool in ("mha", "mla", "mamba")
        for name, ours in (
            ("transfer_kv_per_layer_direct_pf_lf", "load_layer"),
            ("transfer_kv_all_layer_direct_lf_pf", "back_up_layers"),
        )
    ),
    Replaced(
        HOST_POOLS + "base:HICACHE_HOST_MEMORY_RESERVE_BYTES",
        "hicache.copies:RESERVE_BYTES",
        SCHEDULER,
        "cpu",
        since="0.5.21",
    ),
)
