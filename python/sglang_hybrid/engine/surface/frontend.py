"""Which of SGLang's functions are hooked for what clients may ask, and are told."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import EVERY, HTTP, SCHEDULER, Hook

UPDATER = "srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager."
_PROFILER = "srt.managers.scheduler_components.profiler_manager:SchedulerProfilerManager."
_WORKER = "srt.managers.tp_worker:BaseTpWorker."
_USAGE = "srt.entrypoints.openai.usage_processor:UsageProcessor."
_TOKENIZER = "srt.managers.tokenizer_manager:"
_RECORD = _TOKENIZER + "TokenizerManager.{}_expert_distribution_record"
_CHAT = "srt.entrypoints.openai.serving_chat:OpenAIServingChat."
_RESPONSES = "srt.entrypoints.openai.serving_responses:OpenAIServingResponses."
_ANTHROPIC = "srt.entrypoints.anthropic.serving:"
_OLLAMA = "srt.entrypoints.ollama.serving:OllamaServing."
_HASH = "srt.mem_cache.cpp_utils.native_hash:_load_native_hash_module"
_RUST = "srt.rust_server.server:RustServer."
_BATCH = "srt.managers.schedule_batch:"
_ENCODE = "transformers.tokenization_utils_base:PreTrainedTokenizerBase."
_RING = "srt.distributed.device_communicators.shm_broadcast:"

FRONTEND: tuple[Hook, ...] = (
    Hook("srt.managers.multi_tokenizer_mixin:write_data_for_multi_tokenizer", "BEFORE", "frontend.workers:leave", HTTP),
    Hook("srt.utils.auth:decide_request_auth", "BEFORE", "frontend.access:decide", HTTP),
    Hook("srt.utils.msgspec_utils:msgspec_to_builtins", "AFTER", "frontend.access:mask", HTTP),
    Hook("srt.utils.common:add_prometheus_middleware", "AFTER", "frontend.scrapes:keep_names", HTTP, required=False),
    Hook("starlette.requests:Request.stream", "AROUND", "frontend.bodies:stream", HTTP),
    Hook(
        "srt.entrypoints.http_request_decompression:RequestDecompressionMiddleware.__call__",
        "AROUND",
        "frontend.bodies:decompress",
        HTTP,
        "compressed",
    ),
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.executor:install", HTTP),
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.paths:strip_root", HTTP),
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.looks:tell", HTTP),
    # Not only with segments: the launcher, whose process serves HTTP, registers hooks before it knows.
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.segments.endpoint:open_routes", HTTP),
    Hook(_HASH, "REPLACE", "cache.page_hash:load", SCHEDULER, before="0.5.22"),
    Hook(_HASH, "REPLACE", "cache.page_hash:load_wide", SCHEDULER, since="0.5.22"),
    Hook(
        "srt.disaggregation.kv_events:ZmqEventPublisher._service_replay",
        "AROUND",
        "cache.state_events:replay",
        SCHEDULER,
        since="0.5.21",
    ),
    Hook(_CHAT + "_apply_jinja_template", "AROUND", "frontend.endpoints:render", HTTP, required=False),
    Hook(
        "srt.entrypoints.openai.serving_base:OpenAIServingBase.handle_request",
        "AROUND",
        "frontend.chat:openai",
        HTTP,
        required=False,
    ),
    Hook(_CHAT + "_process_messages", "AROUND", "frontend.chat:process", HTTP, required=False),
    Hook(_RESPONSES + "create_responses", "AROUND", "frontend.chat:responses", HTTP, required=False),
    Hook(
        "srt.entrypoints.openai.protocol:ResponsesRequest.to_sampling_params",
        "AFTER",
        "frontend.chat:sample",
        HTTP,
        required=False,
    ),
    Hook(_ANTHROPIC + "AnthropicServing.handle_messages", "AROUND", "frontend.chat:anthropic", HTTP, required=False),
    Hook(_ANTHROPIC + "_anthropic_usage_from_openai", "AFTER", "frontend.usage:anthropic", HTTP, required=False),
    Hook(
        "srt.entrypoints.openai.serving_tokenize:OpenAIServingTokenize._handle_non_streaming_request",
        "AROUND",
        "frontend.pages:tokenize",
        HTTP,
        required=False,
    ),
    Hook(
        "srt.entrypoints.openai.serving_tokenize:OpenAIServingDetokenize._convert_to_internal_request",
        "BEFORE",
        "frontend.endpoints:detokenize",
        HTTP,
        required=False,
    ),
    Hook(_OLLAMA + "handle_chat", "BEFORE", "frontend.endpoints:require_messages", HTTP, required=False),
    Hook(
        _ANTHROPIC + "AnthropicServing.handle_count_tokens",
        "AROUND",
        "frontend.endpoints:count_tokens",
        HTTP,
        required=False,
    ),
    Hook(_OLLAMA + "_stream_chat_response", "AROUND", "frontend.endpoints:ollama_stream", HTTP, required=False),
    Hook(_OLLAMA + "_stream_generate_response", "AROUND", "frontend.endpoints:ollama_stream", HTTP, required=False),
    Hook(
        "fastapi.dependencies.utils:request_body_to_args",
        "AROUND",
        "frontend.endpoints:read_body",
        HTTP,
        required=False,
    ),
    Hook(
        "fastapi.exceptions:RequestValidationError.__init__",
        "AROUND",
        "frontend.endpoints:mistaken",
        HTTP,
        required=False,
    ),
    Hook("fastapi.routing:run_endpoint_function", "AROUND", "frontend.endpoints:call", HTTP, required=False),
    Hook(
        "srt.constrained.base_grammar_backend:BaseGrammarBackend.set_cache",
        "AFTER",
        "frontend.grammars:keep",
        SCHEDULER,
    ),
    Hook("srt.managers.schedule_batch:Req.__init__", "AFTER", "frontend.ids:name", SCHEDULER),
    Hook("srt.managers.schedule_batch:Req.__init__", "AFTER", "frontend.processors:note", SCHEDULER),
    Hook("srt.sampling.custom_logit_processor:_cache_from_str", "AROUND", "frontend.processors:guard", EVERY),
    Hook(
        "srt.beam_search.coordinator:BeamCoordinator.validate_and_init",
        "AROUND",
        "frontend.beams:refuse",
        SCHEDULER,
        since="0.5.21",
    ),
    Hook(_TOKENIZER + "TokenizerManager.auto_create_handle_loop", "BEFORE", "frontend.loop:require_same", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.generate_request", "AROUND", "frontend.requests:generate", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._validate_one_request", "BEFORE", "frontend.requests:validate", HTTP),
    Hook(
        "srt.session.session_controller:SessionController.open",
        "AROUND",
        "frontend.mistakes:open_session",
        SCHEDULER,
    ),
    Hook(UPDATER + "release_memory_occupation", "AROUND", "frontend.released:release", SCHEDULER),
    Hook(UPDATER + "resume_memory_occupation", "AROUND", "frontend.released:resume", SCHEDULER),
    Hook(UPDATER + "update_weights_from_tensor", "AROUND", "frontend.mistakes:update_weights", SCHEDULER),
    Hook(UPDATER + "update_weights_from_disk", "AROUND", "frontend.mistakes:load_from_disk", SCHEDULER),
    Hook(_WORKER + "init_weights_update_group", "AROUND", "frontend.mistakes:join_group", SCHEDULER),
    Hook(_WORKER + "init_weights_send_group_for_remote_instance", "AROUND", "frontend.mistakes:join_group", SCHEDULER),
    Hook(_WORKER + "send_weights_to_remote_instance", "AROUND", "frontend.mistakes:send_weights", SCHEDULER),
    Hook("srt.managers.communicator:FanOutCommunicator.__call__", "AROUND", "frontend.flushes:all_of_them", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.abort_request", "BEFORE", "frontend.segments.aborts:note", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.unload_lora_adapter", "AROUND", "frontend.adapters:forget", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._unload_lora_adapter_locked", "AROUND", "frontend.adapters:unload", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.pause_generation", "AROUND", "frontend.drain:pause", HTTP),
    Hook(  # of several HTTP processes, which do not call the one above
        "srt.managers.multi_tokenizer_mixin:TokenizerWorker.pause_generation",
        "AROUND",
        "frontend.drain:pause",
        HTTP,
        required=False,
    ),
    Hook("srt.managers.multi_tokenizer_mixin:TokenizerWorker.__init__", "AFTER", "frontend.identity:join", HTTP),
    Hook("uvicorn.server:Server.main_loop", "BEFORE", "frontend.drain:serve", HTTP),
    Hook("uvicorn.server:Server.shutdown", "BEFORE", "frontend.drain:close", HTTP),
    Hook("uvicorn.supervisors.multiprocess:Multiprocess.__init__", "AROUND", "launch.stop:keep_handlers", HTTP),
    Hook("uvicorn.supervisors.multiprocess:Process.ping", "AROUND", "launch.stop:answers", HTTP),
    Hook("srt.entrypoints.http_server:_wait_and_warmup", "AROUND", "frontend.drain:warm_up", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.sigterm_watchdog", "AROUND", "frontend.drain:drain", HTTP),
    Hook(_RECORD.format("start"), "BEFORE", "frontend.endpoints:check_recorder", HTTP),
    Hook(_RECORD.format("stop"), "BEFORE", "frontend.endpoints:check_recorder", HTTP),
    Hook(_RECORD.format("dump"), "BEFORE", "frontend.endpoints:check_recorder", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.start_profile", "BEFORE", "frontend.profiles:check", HTTP),
    Hook(_PROFILER + "_stop_profile", "AROUND", "frontend.profiles:stop", SCHEDULER),
    Hook(_TOKENIZER + "TokenizerManager.collect_metrics", "AROUND", "frontend.labels:collect", HTTP),
    Hook("srt.observability.metrics_collector:QueueCount.from_reqs", "AFTER", "frontend.labels:count", SCHEDULER),
    Hook(_TOKENIZER + "TokenizerManager.configure_logging", "BEFORE", "frontend.endpoints:check_logging", HTTP),
    Hook("srt.sampling.sampling_params:get_max_seq_length", "AFTER", "frontend.stop_patterns:span", HTTP),
    Hook(_USAGE + "calculate_response_usage", "AFTER", "frontend.usage:explain", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._handle_batch_output", "BEFORE", "frontend.usage:carry", HTTP),
    Hook(_CHAT + "_continuous_usage_cached_details", "AFTER", "frontend.usage:explain_chunk", HTTP, required=False),
    Hook(_USAGE + "calculate_streaming_usage", "AFTER", "frontend.usage:explain_stream", HTTP),
    Hook(_TOKENIZER + "SignalHandler.running_phase_sigquit_handler", "BEFORE", "backend:explain_dead_child", HTTP),
    Hook("srt.utils.common:kill_process_tree", "AROUND", "launch.stop:end_with_status", EVERY),
    Hook("srt.entrypoints.engine:Engine.shutdown", "AROUND", "launch.embedded:shutdown", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.auto_create_handle_loop", "AROUND", "launch.embedded:keep_signals", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._wait_one_response", "AROUND", "launch.embedded:hear", HTTP),
    Hook("srt.utils.watchdog:SubprocessWatchdog._check_processes", "AROUND", "launch.embedded:check", HTTP),
    Hook("srt.server_args:PortArgs.init_new", "AFTER", "launch.leftovers:note", EVERY),
    Hook(
        "srt.managers.multi_tokenizer_mixin:MultiTokenizerRouter.__init__",
        "AFTER",
        "launch.leftovers:note_workers",
        HTTP,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.__init__",
        "BEFORE",
        "launch.stop:bind_spawned",
        EVERY,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.launch_dp_schedulers",
        "BEFORE",
        "launch.leftovers:tell",
        EVERY,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.round_robin_scheduler",
        "AROUND",
        "frontend.dispatch:by_prefix",
        EVERY,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.send_control_message",
        "BEFORE",
        "frontend.dispatch:forget",
        EVERY,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.launch_tensor_parallel_group",
        "AROUND",
        "launch.replicas:wait_for_the_living",
        EVERY,
    ),
    Hook(_RING + "MessageQueue.wait_until_ready", "AFTER", "launch.leftovers:unname", SCHEDULER),
    Hook("srt.utils.watchdog:SubprocessWatchdog._check_processes", "BEFORE", "launch.replicas:watch", HTTP),
    # Long texts.
    Hook(_TOKENIZER + "TokenizerManager.init_tokenizer_and_processor", "AFTER", "frontend.texts:bound", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._tokenize_texts", "AROUND", "frontend.texts:tokenize", HTTP),
    Hook(_ENCODE + "__call__", "BEFORE", "frontend.texts:require_length", HTTP),
    Hook(_ENCODE + "encode", "AROUND", "frontend.texts:encode", HTTP),
    Hook(
        "srt.entrypoints.openai.serving_chat:parallel_prompt_encode",
        "AROUND",
        "frontend.texts:encode_prompt",
        HTTP,
        since="0.5.22",
    ),
    Hook(
        "srt.entrypoints.openai.parallel_prompt_encode:split_prompt",
        "BEFORE",
        "frontend.texts:require_piece",
        HTTP,
        since="0.5.22",
    ),
    # Images, videos and sounds.
    Hook(_TOKENIZER + "TokenizerManager._tokenize_one_request", "AROUND", "frontend.processing:tokenize", HTTP),
    Hook(
        "srt.multimodal.processors.executor:MultimodalProcessorExecutor._run", "AROUND", "frontend.processing:run", HTTP
    ),
    Hook(_BATCH + "MultimodalDataItem.set_pad_value", "AROUND", "cache.media:identify", EVERY),
    Hook(_BATCH + "MultimodalInputs.from_processor_output", "AFTER", "cache.media:tell_apart", SCHEDULER),
    Hook(UPDATER + "_observe_weight_load", "BEFORE", "cache.media:weights_change", SCHEDULER),
    # SGLang's server in Rust.
    Hook(_RUST + "push_generation", "BEFORE", "frontend.rust:plain_ids", SCHEDULER, "rust", since="0.5.23"),
    Hook(_RUST + "push_abort", "BEFORE", "frontend.rust:plain_id", SCHEDULER, "rust", since="0.5.23"),
    Hook(_RUST + "_attach_buffers", "AFTER", "frontend.rust:require", SCHEDULER, "rust", since="0.5.23"),
    Hook(
        "srt.managers.scheduler:Scheduler.maybe_init_rust_server",
        "AFTER",
        "frontend.rust:meet",
        SCHEDULER,
        "rust",
        since="0.5.23",
    ),
)
