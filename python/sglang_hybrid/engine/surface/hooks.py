"""Which of SGLang's functions are hooked, and which names in its modules get another value."""

from __future__ import annotations

from sglang_hybrid.engine.surface.elastic import CONFIGURATOR, ELASTIC, ELASTIC_REPLACED
from sglang_hybrid.engine.surface.frontend import FRONTEND
from sglang_hybrid.engine.surface.hicache import HICACHE, HICACHE_REPLACED
from sglang_hybrid.engine.surface.pairs import PAIRS
from sglang_hybrid.engine.surface.rows import EVERY, SCHEDULER, Hook, Replaced
from sglang_hybrid.engine.surface.scheduler import SCHEDULER_HOOKS, UPDATER
from sglang_hybrid.engine.surface.speculation import CPU_SPECULATION, DRAWING, SPECULATION

_MIXER = "srt.layers.attention.mamba.mamba:"
_OPS = "kernels.ops."
_SCATTER = _OPS + "mamba.mamba_state_scatter_triton:"
_ATTENTION = "srt.layers.attention."
_MAMBA = _ATTENTION + "hybrid_linear_attn_backend:"
_LINEAR = _ATTENTION + "linear."
_GDN = _LINEAR + "gdn_backend:"
_KDA = _LINEAR + "kda_backend:"
_PREFILL_GRAPH = "srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph"
_LATENT_METHOD = "srt.models.deepseek_v2:DeepseekV2AttentionMLA.dispatch_attn_forward_method"
_PAGES = "srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator."
_SESSIONS = "srt.session.session_controller:"
_ADAPTERS = "srt.lora.backend.torch_backend:TorchNativeLoRABackend."
_ARGUMENTS = "srt.arg_groups.mamba_hook:"
_NGRAMS = "srt.models.qwen4_exp:"
_GRANITE = "srt.models.granitemoehybrid:GraniteMoeHybrid"
_RECEIVER = "srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver."
_STREAMER = "srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer."

HOOKS: tuple[Hook, ...] = (
    # Where SGLang launches a compiled or Triton kernel whatever the device is.
    Hook(
        _OPS + "attention.fla.fused_norm_gate:FusedRMSNormGated.forward",
        "REPLACE",
        "cpu.norm:fused_rms_norm_gated_forward",
        SCHEDULER,
        "cpu",
    ),
    Hook(_OPS + "attention.fla.layernorm_gated:rms_norm_gated", "REPLACE", "cpu.norm:rms_norm_gated", SCHEDULER, "cpu"),
    Hook(
        _OPS + "elementwise.elementwise:fused_gate_sigmoid_mul_add",
        "REPLACE",
        "cpu.fused:fused_gate_sigmoid_mul_add",
        SCHEDULER,
        "cpu",
    ),
    Hook(
        _OPS + "mamba.triton_ops.ssd_combined:mamba_chunk_scan_combined",
        "REPLACE",
        "cpu.mamba2:mamba_chunk_scan_combined",
        SCHEDULER,
        "cpu",
    ),
    Hook(
        _OPS + "mamba.triton_ops.ssu_dispatch:selective_state_update",
        "REPLACE",
        "cpu.mamba2:selective_state_update",
        SCHEDULER,
        "cpu",
    ),
    Hook(_SCATTER + "track_mamba_states_if_needed", "REPLACE", "cpu.checkpoint:track_states", SCHEDULER, "cpu"),
    Hook(
        _SCATTER + "track_mamba_states_all_layers",
        "REPLACE",
        "cpu.checkpoint:track_states_all_layers",
        SCHEDULER,
        "cpu",
    ),
    *CPU_SPECULATION,
    # Where SGLang asks whether the platform can checkpoint: in a method, in a function, in one for the platform alone.
    Hook(
        _ARGUMENTS + "_platform_supports_mamba_cache_extra_buffer",
        "REPLACE",
        "cpu.extra_buffer:platform_supports_extra_buffer",
        EVERY,
        "cpu",
        since="0.5.22",
    ),
    Hook(
        _ARGUMENTS + "validate_mamba_extra_buffer",
        "REPLACE",
        "cpu.extra_buffer:validate",
        EVERY,
        "cpu",
        since="0.5.19",
        before="0.5.22",
    ),
    Hook(
        "srt.server_args:ServerArgs._validate_mamba_extra_buffer",
        "REPLACE",
        "cpu.extra_buffer:validate_method",
        EVERY,
        "cpu",
        before="0.5.19",
    ),
    Hook(
        _ATTENTION + "torch_native_backend:TorchNativeAttnBackend._run_sdpa_forward_extend",
        "AROUND",
        "cpu.attention:extend",
        SCHEDULER,
        "cpu",
    ),
    Hook(_PAGES + "alloc_extend", "AROUND", "cpu.pages:alloc_extend", SCHEDULER, "cpu"),
    Hook(_PAGES + "alloc_decode", "AROUND", "cpu.pages:alloc_decode", SCHEDULER, "cpu"),
    Hook(
        "srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        "AROUND",
        "cpu.pinning:without_pinning",
        SCHEDULER,
        "cpu",
    ),
    *(
        Hook(f"srt.lora.lora_manager:LoRAManager.{name}", "AROUND", "cpu.pinning:without_pinning", SCHEDULER, "cpu")
        for name in ("__init__", "load_lora_adapter", "fetch_new_loras", "prepare_lora_batch")
    ),
    Hook(_ADAPTERS + "prepare_lora_batch", "AFTER", "cpu.adapters:note_head_rows", SCHEDULER, "cpu"),
    *(
        Hook(_ADAPTERS + name, "AROUND", "cpu.adapters:by_head_rows", SCHEDULER, "cpu")
        for name in ("run_lora_a_sgemm", "run_lora_b_sgemm")
    ),
    Hook("srt.utils.common:parse_lscpu_topology", "AROUND", "processes.stop:without_signals", EVERY, "cpu"),
    Hook(
        _LATENT_METHOD,
        "AFTER",
        "cpu.attention:absorbed",
        SCHEDULER,
        "cpu",
    ),
    Hook("srt.models.kimi_linear:KimiMoE.__init__", "AFTER", "cpu.fused:scale_in_router", SCHEDULER, "cpu"),
    Hook(_MIXER + "mamba_v2_sharded_weight_loader", "AROUND", "cpu.groups:load_copies", SCHEDULER, "cpu"),
    # SGLang 0.5.22 corrected itself.
    *(
        Hook(
            f"{_GRANITE}{kind}DecoderLayer.forward",
            "AFTER",
            "cpu.granite:drop_added_residual",
            SCHEDULER,
            "cpu",
            before="0.5.22",
        )
        for kind in ("Mamba", "Attention")
    ),
    # The cache.
    Hook(
        "srt.arg_groups.overrides:mamba_cache_chunk_size",
        "AROUND",
        "cache.passes.prefill_states:whole_chunks",
        EVERY,
        since="0.5.21",
    ),
    Hook("srt.managers.schedule_batch:ScheduleBatch.prepare_for_extend", "AFTER", "cache.hooks:plan", SCHEDULER),
    Hook("srt.managers.schedule_policy:PrefillAdder.add_one_req", "AROUND", "cache.hooks:admit", SCHEDULER),
    Hook(
        "srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
        "AROUND",
        "cache.hooks:keep_preempted",
        SCHEDULER,
        before="0.5.23",
    ),
    Hook("srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw", "AFTER", "cache.sessions:relieve", SCHEDULER),
    Hook(_SESSIONS + "SessionController.maybe_reap", "BEFORE", "cache.sessions:reap", SCHEDULER),
    Hook(_SESSIONS + "Session.is_timed_out", "AROUND", "cache.sessions:is_timed_out", SCHEDULER),
    Hook(
        "srt.session.streaming_session:StreamingSession.try_cache_finished_req",
        "AROUND",
        "cache.sessions:keep_nothing",
        SCHEDULER,
    ),
    Hook("srt.managers.schedule_batch:Req.reset_for_retract", "AFTER", "cache.sessions:stay_under_way", SCHEDULER),
    Hook(
        "srt.managers.schedule_policy:SchedulePolicy._sort_by_dfs_weight", "AROUND", "cache.sessions:first", SCHEDULER
    ),
    Hook("srt.managers.scheduler:Scheduler._prefetch_kvcache", "AROUND", "cache.sessions:prefetch", SCHEDULER),
    Hook("srt.managers.scheduler:Scheduler.flush_cache", "BEFORE", "cache.sessions:let_go", SCHEDULER),
    Hook("srt.managers.scheduler:Scheduler.abort_request", "AROUND", "cache.sessions:end_turns", SCHEDULER),
    Hook("srt.managers.scheduler:Scheduler._abort_on_queued_limit", "BEFORE", "cache.sessions:change_key", SCHEDULER),
    Hook(
        "srt.managers.scheduler:Scheduler._abort_on_queued_limit", "AROUND", "cache.sessions:end_crowded_out", SCHEDULER
    ),
    Hook(
        "srt.managers.scheduler:Scheduler._set_or_validate_priority", "AROUND", "cache.sessions:end_refused", SCHEDULER
    ),
    Hook(
        "srt.managers.scheduler:Scheduler._reject_sampling_mask_request",
        "AROUND",
        "cache.sessions:end_refused",
        SCHEDULER,
        since="0.5.21",
    ),
    Hook(
        "srt.managers.scheduler:Scheduler._abort_on_waiting_timeout",
        "AROUND",
        "cache.sessions:end_turns",
        SCHEDULER,
        before="0.5.18",
    ),
    Hook("srt.managers.tp_worker:TpModelWorker.get_worker_info", "AFTER", "cache.hooks:admissible", SCHEDULER),
    Hook(
        "srt.model_executor.forward_batch_info:ForwardBatch.init_new", "AFTER", "cache.passes.forward:carry", SCHEDULER
    ),
    Hook(_GDN + "GDNAttnBackend.init_forward_metadata", "AFTER", "cache.passes.forward:extend", SCHEDULER),
    Hook(_KDA + "KDAAttnBackend.init_forward_metadata", "AFTER", "cache.passes.forward:extend", SCHEDULER),
    Hook(
        _PREFILL_GRAPH,
        "AFTER",
        "cache.passes.forward:outside_a_graph",
        SCHEDULER,
    ),
    Hook(
        "srt.model_executor.model_runner_components.layer_setup:compute_attention_and_moe_layers",
        "AFTER",
        "cache.passes.captured:leave_out",
        SCHEDULER,
    ),
    Hook(
        _LINEAR + "short_conv_backend:ShortConvAttnBackend.init_forward_metadata",
        "AFTER",
        "cache.passes.windows:plan",
        SCHEDULER,
    ),
    *(
        Hook(f"srt.models.{module}:causal_conv1d_fn", "AROUND", "cache.passes.windows:save", SCHEDULER)
        for module in ("lfm2", "lfm2_moe")
    ),
    Hook(
        "srt.models.lfm2_moe:fused_lfm_short_conv_prefill",
        "AROUND",
        "cache.passes.windows:save_fused",
        SCHEDULER,
        since="0.5.21",
    ),
    Hook(
        _NGRAMS + "Qwen4ExpPLELayer._short_conv", "AFTER", "cache.passes.ngrams:save_inputs", SCHEDULER, since="0.5.21"
    ),
    Hook(_NGRAMS + "_commit_ple_batch", "AFTER", "cache.passes.ngrams:save_tokens", SCHEDULER, since="0.5.21"),
    Hook(_MAMBA + "Mamba2AttnBackend.init_forward_metadata", "AFTER", "cache.passes.forward:extend", SCHEDULER),
    Hook(_MAMBA + "Mamba2AttnBackend.forward", "AROUND", "cache.passes.forward:mix", SCHEDULER),
    Hook(_STREAMER + "get_cached_tokens_details", "AFTER", "cache.hooks:details", SCHEDULER),
    Hook(
        "srt.mem_cache.allocator.mamba:MambaSlotAllocator.alloc_group_begin",
        "AROUND",
        "cache.hooks:set_aside",
        SCHEDULER,
    ),
    Hook(_RECEIVER + "_pull_raw_reqs", "AFTER", "cache.clock:stamp", SCHEDULER),
    Hook(_RECEIVER + "_split_work_and_control_reqs", "AFTER", "cache.clock:keep_with_work", SCHEDULER),
    # Each runs after the next: a request that is held has left its stamp, and one is refused when it would be handled.
    Hook("srt.managers.scheduler:Scheduler.process_input_requests", "BEFORE", "scheduler.released:refuse", SCHEDULER),
    Hook("srt.managers.scheduler:Scheduler.process_input_requests", "BEFORE", "scheduler.idle:hold", SCHEDULER),
    Hook("srt.managers.scheduler:Scheduler.process_input_requests", "BEFORE", "cache.clock:take_stamps", SCHEDULER),
    Hook("srt.mem_cache.memory_pool:MambaPool.copy_from", "AROUND", "cache.passes.kernels:copy", SCHEDULER),
    Hook(_GDN + "GDNKernelDispatcher.extend", "AROUND", "cache.passes.kernels:keep", SCHEDULER),
    Hook(_KDA + "KDAKernelDispatcher.extend", "AROUND", "cache.passes.kernels:keep_by_channel", SCHEDULER),
    Hook(_MAMBA + "MambaAttnBackendBase._track_mamba_state_extend", "AFTER", "cache.passes.kernels:roll", SCHEDULER),
    Hook(
        "srt.observability.metrics_collector:SchedulerMetricsCollector.init_new",
        "AFTER",
        "publish:learn_labels",
        SCHEDULER,
    ),
    *SPECULATION,
    *PAIRS,
    *ELASTIC,
    # Segments.
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
    *FRONTEND,
    *SCHEDULER_HOOKS,
    *HICACHE,
)
"""Where two have one target, those AFTER it run in this order, those BEFORE and AROUND it in the opposite one."""

REPLACED: tuple[Replaced, ...] = (
    *DRAWING,
    # The Mamba-2 mixer calls them but imports them on other platforms only; there is nothing to hook until they exist.
    Replaced(_MIXER + "causal_conv1d_fn", "cpu.causal_conv:causal_conv1d_fn", SCHEDULER, "cpu", absent=True),
    Replaced(_MIXER + "causal_conv1d_fn_triton", "cpu.causal_conv:causal_conv1d_fn", SCHEDULER, "cpu", absent=True),
    Replaced(_MIXER + "causal_conv1d_update", "cpu.causal_conv:causal_conv1d_update", SCHEDULER, "cpu", absent=True),
    Replaced(
        _MIXER + "causal_conv1d_update_triton", "cpu.causal_conv:causal_conv1d_update", SCHEDULER, "cpu", absent=True
    ),
    *(
        Replaced(f"srt.models.{module}:{name}", f"cpu.causal_conv:{name}", SCHEDULER, "cpu")
        for module in ("lfm2", "lfm2_moe")
        for name in ("causal_conv1d_fn", "causal_conv1d_update")
    ),
    # With data-parallel attention batches are padded to the size of the largest.
    Replaced(
        _ATTENTION + "torch_native_backend:TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value",
        "cpu.attention:padded_length",
        SCHEDULER,
        "cpu",
        absent=True,
    ),
    # Kimi delta attention: Triton kernels everywhere.
    Replaced(_LINEAR + "kernels.kda_triton:chunk_kda", "cpu.kda:chunk_kda", SCHEDULER, "cpu", absent=True),
    Replaced(
        _LINEAR + "kernels.kda_triton:fused_sigmoid_gating_delta_rule_update",
        "cpu.kda:recurrent_kda",
        SCHEDULER,
        "cpu",
        absent=True,
    ),
    Replaced(_KDA + "causal_conv1d_fn", "cpu.causal_conv:causal_conv1d_fn", SCHEDULER, "cpu"),
    *HICACHE_REPLACED,
    *ELASTIC_REPLACED,
)
