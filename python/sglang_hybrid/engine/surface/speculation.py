"""What is hooked and used of SGLang for speculative decoding."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import EVERY, SCHEDULER, SUBCLASS, Hook, Replaced, Use
from sglang_hybrid.engine.surface.scheduler import UPDATER

_OURS = "cpu.speculation."
_RESULTS = "srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor."
_FACTORY = "srt.speculative.draft_utils:DraftBackendFactory."

SPECULATION: tuple[Hook, ...] = (
    Hook(
        _RESULTS + "_mamba_check_track_boundary",
        "AROUND",
        "speculation.guards:boundary",
        SCHEDULER,
        before="0.5.23",
    ),
    Hook(_RESULTS + "_mamba_prefix_cache_update", "AFTER", "speculation.guards:settle", SCHEDULER),
    Hook(
        _RESULTS + "_mamba_can_cache_finished_req",
        "AROUND",
        "speculation.guards:may_file",
        SCHEDULER,
        since="0.5.23",
    ),
    Hook(
        "srt.managers.schedule_batch:set_mamba_track_indices_from_reqs",
        "AFTER",
        "speculation.guards:spare_freed",
        SCHEDULER,
        before="0.5.23",
    ),
    Hook("srt.managers.schedule_batch:Req.update_finish_state", "AROUND", "speculation.stops:first_end", SCHEDULER),
    *(
        Hook(UPDATER + f"update_weights_from_{source}", "AROUND", "speculation.weights:spare_draft", SCHEDULER)
        for source in ("distributed", "ipc")
    ),
)
"""Where a run of several tokens is taken for less or more than it is, of which SGLang 0.5.23 corrected two; and where a
draft is given weights that are not its own."""

CPU_SPECULATION: tuple[Hook, ...] = (
    Hook(
        "srt.arg_groups.speculative_hook:_disable_overlap_schedule_for_cpu",
        "REPLACE",
        _OURS + "overlap:stay_as_asked",
        EVERY,
        "cpu",
        since="0.5.21",
    ),
    Hook(
        "srt.managers.overlap_utils:FutureMap._resolve_spec_extras",
        "BEFORE",
        _OURS + "overlap:without_streams",
        SCHEDULER,
        "cpu",
        since="0.5.21",
        before="0.5.23",
    ),
    *(
        Hook(target, how, function, SCHEDULER, "cpu", since="0.5.21")
        for target, how, function in (
            (
                "kernels.ops.mamba.mamba_state_scatter_triton:scatter_mamba_states_after_mtp_verify",
                "REPLACE",
                _OURS + "candidates:commit",
            ),
            (
                "srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend",
                "BEFORE",
                _OURS + "attention:note_tree",
            ),
            # Candidates need the convolution that can start from a parent; which it is makes no difference here.
            (
                "srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward",
                "BEFORE",
                "pools.hooks:strided_convolution",
            ),
            ("srt.managers.schedule_batch:set_mamba_track_indices_from_reqs", "AROUND", "cpu.pinning:without_pinning"),
            (
                "kernels.ops.speculative.gather_spec_extras:gather_spec_extras",
                "REPLACE",
                _OURS + "overlap:gather_spec_extras",
            ),
            (_FACTORY + "create_decode_backend", "REPLACE", _OURS + "drafts:decode_backend"),
            (_FACTORY + "create_draft_extend_backend", "REPLACE", _OURS + "drafts:extend_backend"),
            ("srt.speculative.eagle_utils:_verify_uses_greedy", "REPLACE", _OURS + "sampling:takes_greatest"),
        )
    ),
)
"""Where SGLang speculates on a CPU with compiled or Triton kernels, and by greatest logits alone."""

DRAWING: tuple[Replaced, ...] = tuple(
    Replaced(f"srt.speculative.eagle_utils:{name}", f"{_OURS}sampling:{name}", SCHEDULER, "cpu", since="0.5.23")
    for name in ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob")
)
"""Before, SGLang imports them from sgl_kernel where it draws; now it has None there on a CPU."""

SPECULATION_USES: tuple[Use, ...] = (
    Use(
        "srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",
        SUBCLASS,
        "cpu.speculation.drafts",
        SCHEDULER,
        when="cpu",
    ),
)
