"""What is hooked of SGLang for its radix cache: admission, plans, forward passes, sessions, clocks, events."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import EVERY, SCHEDULER, Hook

_HASH = "srt.mem_cache.cpp_utils.native_hash:_load_native_hash_module"
_ATTENTION = "srt.layers.attention."
_MAMBA = _ATTENTION + "hybrid_linear_attn_backend:"
_LINEAR = _ATTENTION + "linear."
_GDN = _LINEAR + "gdn_backend:"
_KDA = _LINEAR + "kda_backend:"
_PREFILL_GRAPH = "srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph"
_SESSIONS = "srt.session.session_controller:"
_NGRAMS = "srt.models.qwen4_exp:"
_RECEIVER = "srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver."
_STREAMER = "srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer."

CACHE: tuple[Hook, ...] = (
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
    Hook(_HASH, "REPLACE", "cache.page_hash:load", SCHEDULER, before="0.5.22"),
    Hook(_HASH, "REPLACE", "cache.page_hash:load_wide", SCHEDULER, since="0.5.22"),
    Hook(
        "srt.disaggregation.kv_events:ZmqEventPublisher._service_replay",
        "AROUND",
        "cache.state_events:replay",
        SCHEDULER,
        since="0.5.21",
    ),
)
