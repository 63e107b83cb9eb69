"""What the package imports, subclasses, assigns to and reaches of SGLang."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import (
    ASSIGNED,
    CLIENT,
    EVERY,
    HTTP,
    IMPORT,
    LAUNCHER,
    NAME,
    PRIVATE,
    SCHEDULER,
    SUBCLASS,
    Use,
)

_CORE = "srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore"

USES: tuple[Use, ...] = (
    Use("benchmark.serving:cli_main", IMPORT, "bench_serving", CLIENT),
    Use("launch_server:run_server", IMPORT, "launch_server", LAUNCHER),
    Use("srt.arg_groups.overrides:resolving_view", IMPORT, "compat", EVERY, since="0.5.21"),
    Use(
        "srt.arg_groups.overrides:supports_mamba_cache_extra_buffer", IMPORT, "cpu.extra_buffer", SCHEDULER, when="cpu"
    ),
    Use("srt.constants:HEALTH_CHECK_RID_PREFIX", IMPORT, "frontend.ids", SCHEDULER),
    Use("srt.entrypoints.openai.protocol:PromptTokensDetails", IMPORT, "frontend.usage", HTTP),
    Use("srt.entrypoints.openai:protocol", IMPORT, "frontend.usage", HTTP),
    Use("srt.environ:envs", IMPORT, "launch.slots", LAUNCHER),
    Use("srt.layers.attention.mamba.mamba2_metadata:ForwardMetadata", IMPORT, "cache.prefill_states", SCHEDULER),
    Use("srt.managers.io_struct:ReleaseMemoryOccupationReqOutput", IMPORT, "pools.hooks", SCHEDULER, when="elastic"),
    Use("srt.managers.io_struct:ResumeMemoryOccupationReqOutput", IMPORT, "pools.hooks", SCHEDULER, when="elastic"),
    Use("srt.managers.io_struct:SessionParams", IMPORT, "frontend.arrival", HTTP),
    Use("srt.managers.schedule_policy:AddReqResult", IMPORT, "cache.hooks", SCHEDULER),
    Use("srt.managers.schedule_policy:CLIP_MAX_NEW_TOKENS", IMPORT, "pools.memory", SCHEDULER, when="elastic"),
    Use("srt.managers:io_struct", IMPORT, "frontend.ids", SCHEDULER),
    Use("srt.mem_cache.allocator.mamba:MambaSlotAllocator", SUBCLASS, "pools.states", SCHEDULER, when="elastic"),
    Use(
        "srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator",
        SUBCLASS,
        "pools.allocators",
        SCHEDULER,
        when="elastic",
    ),
    Use("srt.mem_cache.allocator.paged:alloc_extend_naive", IMPORT, "cpu.pages", SCHEDULER, when="cpu"),
    Use(
        "srt.mem_cache.allocator.token:TokenToKVPoolAllocator", SUBCLASS, "pools.allocators", SCHEDULER, when="elastic"
    ),
    Use("srt.mem_cache.base_prefix_cache:EvictParams", IMPORT, "cache.memory pools.memory", SCHEDULER),
    Use("srt.mem_cache.base_prefix_cache:InsertParams", IMPORT, "cache.components", SCHEDULER),
    Use("srt.mem_cache.base_prefix_cache:zero_match_result", IMPORT, "cache.components", SCHEDULER),
    Use("srt.mem_cache.memory_pool:HybridReqToTokenPool", SUBCLASS, "pools.states", SCHEDULER, when="elastic"),
    Use("srt.mem_cache.memory_pool:MHATokenToKVPool", SUBCLASS, "pools.kv", SCHEDULER, when="elastic"),
    Use("srt.mem_cache.memory_pool:MambaPool", SUBCLASS, "pools.states", SCHEDULER, when="elastic"),
    Use(
        "srt.mem_cache.prefill_budget:PrefillBudget",
        SUBCLASS,
        "pools.allocators",
        SCHEDULER,
        when="elastic",
        since="0.5.21",
    ),
    Use("srt.mem_cache.registry:default_radix_cache_factory", IMPORT, "cache.build", SCHEDULER),
    Use("srt.mem_cache.registry:register_radix_cache_backend", IMPORT, "backend", EVERY),
    Use("srt.mem_cache.unified_cache.cache_action:BackupKV", IMPORT, "hicache.tier", SCHEDULER),
    Use("srt.mem_cache.unified_cache.components.base:EvictLayer", IMPORT, "hicache.tier", SCHEDULER, since="0.5.21"),
    Use("srt.mem_cache.unified_cache.components:ComponentType", IMPORT, "cache.components", SCHEDULER),
    Use("srt.mem_cache.unified_cache.components:FullComponent", SUBCLASS, "cache.components", SCHEDULER),
    Use("srt.mem_cache.unified_cache.components:MambaComponent", SUBCLASS, "cache.components", SCHEDULER),
    Use(
        "srt.mem_cache.unified_cache.tree_core_registry:register_tree_core_backend",
        IMPORT,
        "cache.radix_cache",
        SCHEDULER,
    ),
    Use("srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore", SUBCLASS, "cache.tree_core", SCHEDULER),
    Use(
        "srt.mem_cache.unified_cache.unified_tree_core_interface:EvictDeviceNextNodeResult",
        IMPORT,
        "cache.tree_core",
        SCHEDULER,
    ),
    Use("srt.mem_cache.unified_radix_cache:UnifiedRadixCache", SUBCLASS, "cache.radix_cache", SCHEDULER),
    Use("srt.mem_cache:registry", IMPORT, "cache.radix_cache", SCHEDULER),
    Use("srt.plugins:load_plugins", IMPORT, "frontend.workers launch_server", EVERY),
    Use("srt.runtime_context:get_context", IMPORT, "pools.sizes", SCHEDULER, when="elastic"),
    Use("srt.runtime_context:get_exec", IMPORT, "pools.sizes", SCHEDULER, when="elastic"),
    Use("srt.runtime_context:get_parallel", IMPORT, "pools.ranks pools.sizes", SCHEDULER, when="elastic"),
    Use("srt.runtime_context:get_schedule", IMPORT, "pools.sizes", SCHEDULER, when="elastic"),
    Use("srt.runtime_context:get_server_args", IMPORT, "compat", EVERY, before="0.5.21"),
    Use("srt.runtime_context:mamba_cache_chunk_size", IMPORT, "compat", EVERY, since="0.5.21"),
    Use("srt.sampling.sampling_params:SamplingParams", IMPORT, "frontend.sampling", HTTP),
    Use("srt.server_args:ServerArgs", IMPORT, "launch.flags", LAUNCHER),
    Use("srt.server_args:prepare_server_args", IMPORT, "launch_server", LAUNCHER),
    Use("srt.utils.auth:AuthLevel", IMPORT, "frontend.access", HTTP),
    Use("srt.utils.server_args_config_parser:ConfigArgumentMerger", IMPORT, "launch.flags", LAUNCHER, since="0.5.21"),
    Use("srt.utils:get_num_new_pages", IMPORT, "pools.allocators", SCHEDULER, when="elastic"),
    Use("srt.utils:kill_process_tree", IMPORT, "launch_server", LAUNCHER),
    Use("srt.plugins.hook_registry:HookRegistry", IMPORT, "surface.registration", EVERY),
    Use("srt.plugins.hook_registry:HookType", IMPORT, "surface.registration", EVERY),
    # Looked up by name.
    Use("srt.entrypoints.http_server", NAME, "frontend.workers", HTTP),
    Use("srt.models", NAME, "launch.preflight", LAUNCHER),
    Use("srt.platforms", NAME, "launch.doctor", LAUNCHER),
    Use("srt.plugins", NAME, "launch.doctor", LAUNCHER),
    # Extended for answers; SGLang's models drop fields they do not know.
    Use("srt.entrypoints.openai.protocol:PromptTokensDetails.model_config", ASSIGNED, "frontend.usage", HTTP),
    # Names with an underscore.
    Use("srt.managers.io_struct:_USE_PICKLE_IPC", PRIVATE, "frontend.ids", SCHEDULER),
    Use("srt.managers.io_struct:GenerateReqInput._sub_obj_cache", PRIVATE, "frontend.requests", HTTP),
    Use("srt.managers.tokenizer_manager:TokenizerManager._subprocess_watchdog", PRIVATE, "backend", HTTP),
    Use("srt.utils.watchdog:SubprocessWatchdog._names", PRIVATE, "backend", HTTP),
    Use("srt.utils.watchdog:SubprocessWatchdog._processes", PRIVATE, "backend", HTTP),
    Use("srt.managers.scheduler:Scheduler._engine_paused", PRIVATE, "frontend.idle", SCHEDULER),
    Use("srt.plugins.hook_registry:HookRegistry._patched", PRIVATE, "surface.registration", EVERY),
    Use(
        "srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase._translate_mamba_indices",
        PRIVATE,
        "cache.forward",
        SCHEDULER,
    ),
    Use("srt.mem_cache.memory_pool:MambaPool._slot_siblings", PRIVATE, "cache.kernels", SCHEDULER, since="0.5.21"),
    *(
        Use(f"srt.mem_cache.unified_cache.components:MambaComponent.{name}", PRIVATE, "cache.components", SCHEDULER)
        for name in (
            "_alloc_mamba_slot",
            "_evict_device_cursor",
            "_evict_device_end",
            "_evict_device_next_node",
            "_evict_device_request_cnt",
            "_evict_device_start",
        )
    ),
    Use(
        "srt.mem_cache.unified_cache.components:FullComponent._evict_device_heap",
        PRIVATE,
        "cache.components",
        SCHEDULER,
    ),
    Use(
        "srt.mem_cache.unified_cache.components:FullComponent._evict_device_last_node",
        PRIVATE,
        "cache.components",
        SCHEDULER,
    ),
    Use(f"{_CORE}._node_arena", PRIVATE, "cache.components cache.coordinator hicache.tier cache.victims", SCHEDULER),
    *(
        Use(f"{_CORE}.{name}", PRIVATE, "hicache.tier", SCHEDULER)
        for name in (
            "_cascade_evict",
            "_evict_component_and_detach_lru",
            "_evict_host_leaf",
            "_update_evictable_leaf_sets",
        )
    ),
    Use(
        "srt.mem_cache.unified_radix_cache:UnifiedRadixCache._execute_and_commit_kv_backup",
        PRIVATE,
        "hicache.tier",
        SCHEDULER,
    ),
    Use(
        "srt.mem_cache.prefill_budget:PrefillBudget._available_and_evictable",
        PRIVATE,
        "pools.allocators",
        SCHEDULER,
        when="elastic",
        since="0.5.21",
    ),
    Use(
        "srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator._copy_for_free_group",
        PRIVATE,
        "pools.allocators",
        SCHEDULER,
        when="elastic",
        since="0.5.21",
    ),
    Use(
        "srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator._release_page_ids",
        PRIVATE,
        "pools.allocators",
        SCHEDULER,
        when="elastic",
    ),
    Use("srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers", PRIVATE, "pools.kv", SCHEDULER, when="elastic"),
    Use(
        "srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal",
        PRIVATE,
        "pools.kv",
        SCHEDULER,
        when="elastic",
    ),
    Use(
        "srt.mem_cache.allocator.mamba:MambaSlotAllocator._alloc_iter",
        PRIVATE,
        "pools.states",
        SCHEDULER,
        when="elastic",
    ),
    Use(
        "srt.mem_cache.allocator.mamba:MambaSlotAllocator._do_alloc", PRIVATE, "pools.states", SCHEDULER, when="elastic"
    ),
    Use(
        "srt.mem_cache.memory_pool:HybridReqToTokenPool._init_mamba_pool",
        PRIVATE,
        "pools.states",
        SCHEDULER,
        when="elastic",
    ),
)
