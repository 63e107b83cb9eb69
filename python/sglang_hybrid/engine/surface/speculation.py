"""What is hooked and used of SGLang for speculative decoding."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import SCHEDULER, SUBCLASS, Hook, Use

_OURS = "cpu.speculation."
_FACTORY = "srt.speculative.draft_utils:DraftBackendFactory."

CPU_SPECULATION: tuple[Hook, ...] = tuple(
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
        (_FACTORY + "create_decode_backend", "REPLACE", _OURS + "drafts:decode_backend"),
        (_FACTORY + "create_draft_extend_backend", "REPLACE", _OURS + "drafts:extend_backend"),
        ("srt.speculative.eagle_utils:_verify_uses_greedy", "REPLACE", _OURS + "sampling:takes_greatest"),
    )
)
"""Where SGLang speculates on a CPU with compiled or Triton kernels, and by greatest logits alone."""

SPECULATION_USES: tuple[Use, ...] = (
    Use(
        "srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",
        SUBCLASS,
        "cpu.speculation.drafts",
        SCHEDULER,
        when="cpu",
    ),
)
