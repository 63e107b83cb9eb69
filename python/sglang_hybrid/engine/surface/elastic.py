"""What is hooked and replaced of SGLang for elastic memory."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import SCHEDULER, Hook, Replaced
from sglang_hybrid.engine.surface.scheduler import UPDATER

CONFIGURATOR = "srt.mem_cache.kv_cache_configurator:KVCacheConfigurator."
_BUILDER = "srt.mem_cache.kv_cache_configurator:"
_ATTENTION = "srt.layers.attention."
_LINEAR = _ATTENTION + "linear."
_TABLES = _ATTENTION + "trtllm_mha_backend:"

ELASTIC: tuple[Hook, ...] = (
    Hook(CONFIGURATOR + "configure", "AROUND", "pools.hooks:build", SCHEDULER, "elastic"),
    Hook(CONFIGURATOR + "_handle_max_mamba_cache", "AROUND", "pools.sizes:size_pools", SCHEDULER, "elastic"),
    Hook(CONFIGURATOR + "_calculate_mamba_ratio", "AROUND", "pools.sizes:request_states", SCHEDULER, "elastic"),
    Hook(
        "srt.managers.schedule_policy:PrefillAdder.add_chunked_req",
        "AROUND",
        "pools.hooks:continue_chunk",
        SCHEDULER,
        "elastic",
    ),
    Hook(UPDATER + "release_memory_occupation", "AROUND", "pools.hooks:release", SCHEDULER, "elastic"),
    Hook(UPDATER + "resume_memory_occupation", "AROUND", "pools.hooks:resume", SCHEDULER, "elastic"),
    Hook(
        "srt.managers.schedule_batch:ScheduleBatch.prepare_for_extend",
        "AFTER",
        "pools.hooks:passed",
        SCHEDULER,
        "elastic",
    ),
    Hook("srt.managers.scheduler:Scheduler.on_idle", "BEFORE", "pools.hooks:idle", SCHEDULER, "elastic"),
    Hook(
        _ATTENTION + "hybrid_linear_attn_backend:Mamba2AttnBackend.forward",
        "BEFORE",
        "pools.hooks:strided_convolution",
        SCHEDULER,
        "elastic",
    ),
    Hook(
        _TABLES + "TRTLLMHAAttnBackend.__init__",
        "AFTER",
        "pools.hooks:whole_copies",
        SCHEDULER,
        "elastic",
        since="0.5.21",
        before="0.5.23",
    ),
    *(
        Hook(_TABLES + name, "BEFORE", "pools.hooks:tails_with_memory", SCHEDULER, "elastic", since="0.5.21")
        for name in ("build_trtllm_mha_page_table", "update_trtllm_mha_graph_metadata")
    ),
    *(
        Hook(
            _LINEAR + f"kernels.gdn_flashinfer:FlashInferGDNKernel.{name}",
            "BEFORE",
            "pools.hooks:padding_with_memory",
            SCHEDULER,
            "elastic",
        )
        for name in ("decode", "extend")
    ),
    Hook(
        _ATTENTION + "mamba.causal_conv1d:_causal_conv1d_fn_triton",
        "AROUND",
        "cache.passes.convolution:in_sizes",
        SCHEDULER,
        "elastic",
    ),
)

ELASTIC_REPLACED: tuple[Replaced, ...] = (
    # The classes of which SGLang builds its pools; replaced when it begins to.
    Replaced(_BUILDER + "HybridReqToTokenPool", "pools.states:ElasticRequestPool", SCHEDULER, "elastic"),
    Replaced(_BUILDER + "MHATokenToKVPool", "pools.kv:ElasticKV", SCHEDULER, "elastic"),
    # A hybrid pool looked for the latent one beside itself, until its builder began to name it.
    Replaced(
        "srt.mem_cache.memory_pool:MLATokenToKVPool", "pools.kv:ElasticLatents", SCHEDULER, "elastic", before="0.5.22"
    ),
    Replaced(_BUILDER + "MLATokenToKVPool", "pools.kv:ElasticLatents", SCHEDULER, "elastic", since="0.5.22"),
    Replaced(_BUILDER + "TokenToKVPoolAllocator", "pools.allocators:ElasticTokens", SCHEDULER, "elastic"),
    Replaced(_BUILDER + "PagedTokenToKVPoolAllocator", "pools.allocators:ElasticPages", SCHEDULER, "elastic"),
)
