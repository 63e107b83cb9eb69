"""What is hooked and used of SGLang for what clients may ask, and are told."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import ASSIGNED, EVERY, HTTP, IMPORT, NAME, PRIVATE, SCHEDULER, Hook, Use
from sglang_hybrid.engine.surface.scheduler import UPDATER

_USAGE = "srt.entrypoints.openai.usage_processor:UsageProcessor."
_TOKENIZER = "srt.managers.tokenizer_manager:"
_RECORD = _TOKENIZER + "TokenizerManager.{}_expert_distribution_record"
_CHAT = "srt.entrypoints.openai.serving_chat:OpenAIServingChat."
_RESPONSES = "srt.entrypoints.openai.serving_responses:OpenAIServingResponses."
_ANTHROPIC = "srt.entrypoints.anthropic.serving:"
_OLLAMA = "srt.entrypoints.ollama.serving:OllamaServing."
_BATCH = "srt.managers.schedule_batch:"
_ENCODE = "transformers.tokenization_utils_base:PreTrainedTokenizerBase."
_RING = "srt.distributed.device_communicators.shm_broadcast:"

FRONTEND: tuple[Hook, ...] = (
    Hook(
        "srt.managers.multi_tokenizer_mixin:write_data_for_multi_tokenizer",
        "BEFORE",
        "frontend.server.workers:leave",
        HTTP,
    ),
    Hook("srt.utils.auth:decide_request_auth", "BEFORE", "frontend.admin.access:decide", HTTP),
    Hook("srt.utils.msgspec_utils:msgspec_to_builtins", "AFTER", "frontend.admin.access:mask", HTTP),
    Hook(
        "srt.utils.common:add_prometheus_middleware",
        "AFTER",
        "frontend.reporting.scrapes:keep_names",
        HTTP,
        required=False,
    ),
    Hook("starlette.requests:Request.stream", "AROUND", "frontend.validation.bodies:stream", HTTP),
    Hook(
        "srt.entrypoints.http_request_decompression:RequestDecompressionMiddleware.__call__",
        "AROUND",
        "frontend.validation.bodies:decompress",
        HTTP,
        "compressed",
    ),
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.server.executor:install", HTTP),
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.server.paths:strip_root", HTTP),
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.server.looks:tell", HTTP),
    # Not only with segments: the launcher, whose process serves HTTP, registers hooks before it knows.
    Hook("starlette.applications:Starlette.__call__", "BEFORE", "frontend.segments.endpoint:open_routes", HTTP),
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
    Hook(
        _ANTHROPIC + "_anthropic_usage_from_openai", "AFTER", "frontend.reporting.usage:anthropic", HTTP, required=False
    ),
    Hook(
        "srt.entrypoints.openai.serving_tokenize:OpenAIServingTokenize._handle_non_streaming_request",
        "AROUND",
        "frontend.tokenization.pages:tokenize",
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
    Hook(_TOKENIZER + "TokenizerManager.auto_create_handle_loop", "BEFORE", "frontend.server.loop:require_same", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.generate_request", "AROUND", "frontend.requests:generate", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._validate_one_request", "BEFORE", "frontend.requests:validate", HTTP),
    Hook("srt.managers.communicator:FanOutCommunicator.__call__", "AROUND", "frontend.admin.flushes:all_of_them", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.abort_request", "BEFORE", "frontend.segments.aborts:note", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.unload_lora_adapter", "AROUND", "frontend.admin.adapters:forget", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._unload_lora_adapter_locked", "AROUND", "frontend.admin.adapters:unload", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.pause_generation", "AROUND", "frontend.server.drain:pause", HTTP),
    Hook(  # of several HTTP processes, which do not call the one above
        "srt.managers.multi_tokenizer_mixin:TokenizerWorker.pause_generation",
        "AROUND",
        "frontend.server.drain:pause",
        HTTP,
        required=False,
    ),
    Hook("srt.managers.multi_tokenizer_mixin:TokenizerWorker.__init__", "AFTER", "frontend.server.identity:join", HTTP),
    Hook("uvicorn.server:Server.main_loop", "BEFORE", "frontend.server.drain:serve", HTTP),
    Hook("uvicorn.server:Server.shutdown", "BEFORE", "frontend.server.drain:close", HTTP),
    Hook("uvicorn.supervisors.multiprocess:Multiprocess.__init__", "AROUND", "processes.stop:keep_handlers", HTTP),
    Hook("uvicorn.supervisors.multiprocess:Process.ping", "AROUND", "processes.stop:answers", HTTP),
    Hook("srt.entrypoints.http_server:_wait_and_warmup", "AROUND", "frontend.server.drain:warm_up", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.sigterm_watchdog", "AROUND", "frontend.server.drain:drain", HTTP),
    Hook(_RECORD.format("start"), "BEFORE", "frontend.endpoints:check_recorder", HTTP),
    Hook(_RECORD.format("stop"), "BEFORE", "frontend.endpoints:check_recorder", HTTP),
    Hook(_RECORD.format("dump"), "BEFORE", "frontend.endpoints:check_recorder", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.start_profile", "BEFORE", "frontend.admin.profiles:check", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.collect_metrics", "AROUND", "frontend.reporting.labels:collect", HTTP),
    Hook(
        "srt.observability.metrics_collector:QueueCount.from_reqs",
        "AFTER",
        "frontend.reporting.labels:count",
        SCHEDULER,
    ),
    Hook(_TOKENIZER + "TokenizerManager.configure_logging", "BEFORE", "frontend.endpoints:check_logging", HTTP),
    Hook("srt.sampling.sampling_params:get_max_seq_length", "AFTER", "frontend.validation.stop_patterns:span", HTTP),
    Hook(_USAGE + "calculate_response_usage", "AFTER", "frontend.reporting.usage:explain", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._handle_batch_output", "BEFORE", "frontend.reporting.usage:carry", HTTP),
    Hook(
        _CHAT + "_continuous_usage_cached_details",
        "AFTER",
        "frontend.reporting.usage:explain_chunk",
        HTTP,
        required=False,
    ),
    Hook(_USAGE + "calculate_streaming_usage", "AFTER", "frontend.reporting.usage:explain_stream", HTTP),
    Hook(_TOKENIZER + "SignalHandler.running_phase_sigquit_handler", "BEFORE", "backend:explain_dead_child", HTTP),
    Hook("srt.utils.common:kill_process_tree", "AROUND", "processes.stop:end_with_status", EVERY),
    Hook("srt.entrypoints.engine:Engine.shutdown", "AROUND", "processes.embedded:shutdown", HTTP),
    Hook(_TOKENIZER + "TokenizerManager.auto_create_handle_loop", "AROUND", "processes.embedded:keep_signals", HTTP),
    Hook(_TOKENIZER + "TokenizerManager._wait_one_response", "AROUND", "processes.embedded:hear", HTTP),
    Hook("srt.utils.watchdog:SubprocessWatchdog._check_processes", "AROUND", "processes.embedded:check", HTTP),
    Hook("srt.server_args:PortArgs.init_new", "AFTER", "processes.leftovers:note", EVERY),
    Hook(
        "srt.managers.multi_tokenizer_mixin:MultiTokenizerRouter.__init__",
        "AFTER",
        "processes.leftovers:note_workers",
        HTTP,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.__init__",
        "BEFORE",
        "processes.stop:bind_spawned",
        EVERY,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.launch_dp_schedulers",
        "BEFORE",
        "processes.leftovers:tell",
        EVERY,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.launch_tensor_parallel_group",
        "AROUND",
        "processes.replicas:wait_for_the_living",
        EVERY,
    ),
    Hook(_RING + "MessageQueue.wait_until_ready", "AFTER", "processes.leftovers:unname", SCHEDULER),
    Hook("srt.utils.watchdog:SubprocessWatchdog._check_processes", "BEFORE", "processes.replicas:watch", HTTP),
    # Long texts.
    Hook(
        _TOKENIZER + "TokenizerManager.init_tokenizer_and_processor", "AFTER", "frontend.tokenization.texts:bound", HTTP
    ),
    Hook(_TOKENIZER + "TokenizerManager._tokenize_texts", "AROUND", "frontend.tokenization.texts:tokenize", HTTP),
    Hook(_ENCODE + "__call__", "BEFORE", "frontend.tokenization.texts:require_length", HTTP),
    Hook(_ENCODE + "encode", "AROUND", "frontend.tokenization.texts:encode", HTTP),
    Hook(
        "srt.entrypoints.openai.serving_chat:parallel_prompt_encode",
        "AROUND",
        "frontend.tokenization.texts:encode_prompt",
        HTTP,
        since="0.5.22",
    ),
    Hook(
        "srt.entrypoints.openai.parallel_prompt_encode:split_prompt",
        "BEFORE",
        "frontend.tokenization.texts:require_piece",
        HTTP,
        since="0.5.22",
    ),
    # Images, videos and sounds.
    Hook(
        _TOKENIZER + "TokenizerManager._tokenize_one_request",
        "AROUND",
        "frontend.tokenization.processing:tokenize",
        HTTP,
    ),
    Hook(
        "srt.multimodal.processors.executor:MultimodalProcessorExecutor._run",
        "AROUND",
        "frontend.tokenization.processing:run",
        HTTP,
    ),
    Hook(_BATCH + "MultimodalDataItem.set_pad_value", "AROUND", "cache.media:identify", EVERY),
    Hook(_BATCH + "MultimodalInputs.from_processor_output", "AFTER", "cache.media:tell_apart", SCHEDULER),
    Hook(UPDATER + "_observe_weight_load", "BEFORE", "cache.media:weights_change", SCHEDULER),
)

FRONTEND_USES: tuple[Use, ...] = (
    Use("srt.constants:HEALTH_CHECK_RID_PREFIX", IMPORT, "frontend.validation.ids", EVERY),
    Use("srt.entrypoints.openai.protocol:CachedTokensDetails", IMPORT, "frontend.reporting.usage", HTTP),
    Use("srt.entrypoints.openai.protocol:PromptTokensDetails", IMPORT, "frontend.reporting.usage", HTTP),
    Use("srt.entrypoints.openai.protocol:PromptTokenUsageInfo", IMPORT, "frontend.reporting.usage", HTTP),
    Use("srt.entrypoints.openai.protocol:ResponsesResponse", IMPORT, "frontend.reporting.usage", HTTP),
    Use("srt.entrypoints.openai:protocol", IMPORT, "frontend.reporting.usage", HTTP),
    Use("srt.managers.io_struct:ContinueGenerationReqInput", IMPORT, "frontend.server.drain", HTTP),
    Use("srt.managers.io_struct:PauseGenerationReqInput", IMPORT, "frontend.server.drain", HTTP),
    Use("srt.managers.io_struct:ShutdownReq", IMPORT, "frontend.server.drain", HTTP),
    Use("srt.managers.multi_tokenizer_mixin:TokenizerWorker", IMPORT, "frontend.server.drain", HTTP),
    Use(
        "srt.managers.tokenizer_manager:TokenizerManager._dispatch_to_scheduler", PRIVATE, "frontend.server.drain", HTTP
    ),
    Use("srt.managers.io_struct:SessionParams", IMPORT, "frontend.validation.arrival", HTTP),
    Use("srt.sampling.custom_logit_processor:CustomLogitProcessor", IMPORT, "frontend.validation.processors", HTTP),
    Use("srt.sampling.sampling_params:SamplingParams", IMPORT, "frontend.validation.sampling", HTTP),
    Use("srt.utils.auth:AuthLevel", IMPORT, "frontend.admin.access frontend.segments.endpoint", HTTP),
    Use("srt.utils.auth:auth_level", IMPORT, "frontend.segments.endpoint", HTTP, when="segments"),
    Use("srt.managers.io_struct:GenerateReqInput", IMPORT, "frontend.segments.warming", HTTP, when="segments"),
    Use("srt.managers.io_struct:DumperControlReqInput", IMPORT, "frontend.segments.questions", HTTP, when="segments"),
    Use(
        "srt.entrypoints.openai.serving_chat:OpenAIServingChat._engine_prompt",
        PRIVATE,
        "frontend.segments.chats",
        HTTP,
        when="segments",
    ),
    Use("srt.entrypoints.http_server", NAME, "frontend.server.workers", HTTP),
    # Extended for answers; SGLang's models drop fields they do not know.
    Use("srt.entrypoints.openai.protocol:CachedTokensDetails.__init__", ASSIGNED, "frontend.reporting.usage", HTTP),
    Use("srt.entrypoints.openai.protocol:CachedTokensDetails.model_config", ASSIGNED, "frontend.reporting.usage", HTTP),
    Use("srt.entrypoints.openai.protocol:PromptTokensDetails.model_config", ASSIGNED, "frontend.reporting.usage", HTTP),
    Use("srt.entrypoints.openai.protocol:PromptTokenUsageInfo.__init__", ASSIGNED, "frontend.reporting.usage", HTTP),
    Use(
        "srt.entrypoints.openai.protocol:PromptTokenUsageInfo.model_config", ASSIGNED, "frontend.reporting.usage", HTTP
    ),
    Use("srt.managers.io_struct:GenerateReqInput._sub_obj_cache", PRIVATE, "frontend.requests", HTTP),
    Use("srt.lora.lora_registry:LoRARegistry._counters", PRIVATE, "frontend.admin.adapters", HTTP),
    Use("srt.entrypoints.anthropic.serving:AnthropicServing._error_response", PRIVATE, "frontend.chat", HTTP),
    Use(
        "srt.entrypoints.openai.serving_responses:OpenAIServingResponses._construct_input_messages",
        PRIVATE,
        "frontend.marks.rendering",
        HTTP,
    ),
    Use(
        "srt.entrypoints.openai.serving_responses:OpenAIServingResponses._response_tools_to_chat_tools",
        PRIVATE,
        "frontend.marks.rendering",
        HTTP,
    ),
    Use(
        "srt.entrypoints.openai.serving_chat:OpenAIServingChat._process_messages",
        PRIVATE,
        "frontend.tokenization.ahead",
        HTTP,
    ),
    Use(
        "srt.entrypoints.openai.protocol:ChatCompletionRequest",
        IMPORT,
        "frontend.tokenization.pages frontend.marks.rendering",
        HTTP,
    ),
    Use("srt.entrypoints.openai.protocol:ResponsesRequest", IMPORT, "frontend.tokenization.pages", HTTP),
    Use("srt.entrypoints.anthropic.protocol:AnthropicMessagesRequest", IMPORT, "frontend.tokenization.pages", HTTP),
    Use(
        "srt.entrypoints.openai.serving_tokenize:OpenAIServingTokenize._tokenize_chat_request",
        PRIVATE,
        "frontend.tokenization.pages",
        HTTP,
    ),
    Use(
        "srt.entrypoints.anthropic.serving:AnthropicServing._convert_to_chat_completion_request",
        PRIVATE,
        "frontend.chat frontend.tokenization.pages",
        HTTP,
    ),
)
