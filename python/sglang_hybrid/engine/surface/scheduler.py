"""Which of SGLang's functions are hooked in its scheduler for what clients and administrators ask of it."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import EVERY, SCHEDULER, Hook

UPDATER = "srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager."
_PROFILER = "srt.managers.scheduler_components.profiler_manager:SchedulerProfilerManager."
_WORKER = "srt.managers.tp_worker:BaseTpWorker."
_RUST = "srt.rust_server.server:RustServer."

SCHEDULER_HOOKS: tuple[Hook, ...] = (
    Hook(
        "srt.constrained.base_grammar_backend:BaseGrammarBackend.set_cache",
        "AFTER",
        "scheduler.grammars:keep",
        SCHEDULER,
    ),
    Hook("srt.managers.schedule_batch:Req.__init__", "AFTER", "scheduler.ids:name", SCHEDULER),
    Hook("srt.managers.schedule_batch:Req.__init__", "AFTER", "scheduler.processors:note", SCHEDULER),
    Hook("srt.sampling.custom_logit_processor:_cache_from_str", "AROUND", "scheduler.processors:guard", EVERY),
    Hook(
        "srt.beam_search.coordinator:BeamCoordinator.validate_and_init",
        "AROUND",
        "scheduler.beams:refuse",
        SCHEDULER,
        since="0.5.21",
    ),
    Hook(
        "srt.session.session_controller:SessionController.open",
        "AROUND",
        "scheduler.mistakes:open_session",
        SCHEDULER,
    ),
    Hook(UPDATER + "release_memory_occupation", "AROUND", "scheduler.released:release", SCHEDULER),
    Hook(UPDATER + "resume_memory_occupation", "AROUND", "scheduler.released:resume", SCHEDULER),
    Hook(UPDATER + "update_weights_from_tensor", "AROUND", "scheduler.mistakes:update_weights", SCHEDULER),
    Hook(UPDATER + "update_weights_from_disk", "AROUND", "scheduler.mistakes:load_from_disk", SCHEDULER),
    Hook(_WORKER + "init_weights_update_group", "AROUND", "scheduler.mistakes:join_group", SCHEDULER),
    Hook(_WORKER + "init_weights_send_group_for_remote_instance", "AROUND", "scheduler.mistakes:join_group", SCHEDULER),
    Hook(_WORKER + "send_weights_to_remote_instance", "AROUND", "scheduler.mistakes:send_weights", SCHEDULER),
    Hook(_PROFILER + "_stop_profile", "AROUND", "scheduler.profiles:stop", SCHEDULER),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.round_robin_scheduler",
        "AROUND",
        "scheduler.dispatch:by_prefix",
        EVERY,
    ),
    Hook(
        "srt.managers.data_parallel_controller:DataParallelController.send_control_message",
        "BEFORE",
        "scheduler.dispatch:forget",
        EVERY,
    ),
    # SGLang's server in Rust.
    Hook(_RUST + "push_generation", "BEFORE", "scheduler.rust:plain_ids", SCHEDULER, "rust", since="0.5.23"),
    Hook(_RUST + "push_abort", "BEFORE", "scheduler.rust:plain_id", SCHEDULER, "rust", since="0.5.23"),
    Hook(_RUST + "_attach_buffers", "AFTER", "scheduler.rust:require", SCHEDULER, "rust", since="0.5.23"),
    Hook(
        "srt.managers.scheduler:Scheduler.maybe_init_rust_server",
        "AFTER",
        "scheduler.rust:meet",
        SCHEDULER,
        "rust",
        since="0.5.23",
    ),
)
