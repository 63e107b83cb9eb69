"""What is hooked of SGLang for prompts composed of segments."""

from __future__ import annotations

from sglang_hybrid.engine.surface.elastic import CONFIGURATOR
from sglang_hybrid.engine.surface.rows import SCHEDULER, Hook
from sglang_hybrid.engine.surface.scheduler import UPDATER

_ATTENTION = "srt.layers.attention."
_MAMBA = _ATTENTION + "hybrid_linear_attn_backend:"
_PREFILL_GRAPH = "srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph"
_LATENT_METHOD = "srt.models.deepseek_v2:DeepseekV2AttentionMLA.dispatch_attn_forward_method"

SEGMENTS: tuple[Hook, ...] = (
    Hook(
        "srt.managers.scheduler:Scheduler.process_input_requests",
        "BEFORE",
        "segments.hooks:turn",
        SCHEDULER,
        "segments",
    ),
    Hook(CONFIGURATOR + "_handle_max_mamba_cache", "BEFORE", "segments.hooks:reserve", SCHEDULER, "segments"),
    Hook(
        "srt.managers.schedule_policy:PrefillAdder.add_chunked_req",
        "AROUND",
        "segments.hooks:continue_chunk",
        SCHEDULER,
        "segments",
    ),
    Hook(
        "srt.managers.schedule_batch:ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        "AROUND",
        "segments.hooks:track",
        SCHEDULER,
        "segments",
    ),
    Hook(
        "srt.model_executor.forward_batch_info:ForwardBatch.init_new",
        "AROUND",
        "segments.hooks:shorten",
        SCHEDULER,
        "segments",
    ),
    Hook(
        _MAMBA + "HybridLinearAttnBackend.init_forward_metadata", "AROUND", "segments.hooks:plan", SCHEDULER, "segments"
    ),
    Hook(_MAMBA + "HybridLinearAttnBackend.forward_extend", "AROUND", "segments.hooks:extend", SCHEDULER, "segments"),
    Hook(
        "srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill",
        "AROUND",
        "segments.hooks:draft",
        SCHEDULER,
        "segments",
        since="0.5.21",
    ),
    Hook(_PREFILL_GRAPH, "AFTER", "segments.hooks:outside_a_graph", SCHEDULER, "segments", since="0.5.21"),
    Hook(
        _LATENT_METHOD,
        "AFTER",
        "segments.hooks:absorbed",
        SCHEDULER,
        "segments",
    ),
    Hook(UPDATER + "_observe_weight_load", "BEFORE", "segments.hooks:weights_change", SCHEDULER, "segments"),
    Hook(
        "srt.managers.scheduler:Scheduler.handle_dumper_control",
        "AROUND",
        "segments.listing:control",
        SCHEDULER,
        "segments",
    ),
)
