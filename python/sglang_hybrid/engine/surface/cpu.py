"""What is hooked and replaced of SGLang on a machine without a GPU."""

from __future__ import annotations

from sglang_hybrid.engine.surface.rows import EVERY, SCHEDULER, Hook, Replaced
from sglang_hybrid.engine.surface.speculation import CPU_SPECULATION

_MIXER = "srt.layers.attention.mamba.mamba:"
_OPS = "kernels.ops."
_SCATTER = _OPS + "mamba.mamba_state_scatter_triton:"
_ATTENTION = "srt.layers.attention."
_LINEAR = _ATTENTION + "linear."
_KDA = _LINEAR + "kda_backend:"
_LATENT_METHOD = "srt.models.deepseek_v2:DeepseekV2AttentionMLA.dispatch_attn_forward_method"
_PAGES = "srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator."
_ADAPTERS = "srt.lora.backend.torch_backend:TorchNativeLoRABackend."
_ARGUMENTS = "srt.arg_groups.mamba_hook:"
_GRANITE = "srt.models.granitemoehybrid:GraniteMoeHybrid"

CPU: tuple[Hook, ...] = (
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
)

CPU_REPLACED: tuple[Replaced, ...] = (
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
)
