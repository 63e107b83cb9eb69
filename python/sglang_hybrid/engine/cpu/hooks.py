"""The hooks through which SGLang, running on a plain CPU, reaches the kernels of this package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cpu import (
    attention,
    causal_conv,
    checkpoint,
    extra_buffer,
    fused,
    granite,
    host_tier,
    mamba2,
    norm,
    pages,
    pinning,
)

_OPS = "sglang.kernels.ops."
_SCATTER = _OPS + "mamba.mamba_state_scatter_triton."

REPLACED: dict[str, Callable[..., Any]] = {
    _OPS + "attention.fla.fused_norm_gate.FusedRMSNormGated.forward": norm.fused_rms_norm_gated_forward,
    _OPS + "attention.fla.layernorm_gated.rms_norm_gated": norm.rms_norm_gated,
    _OPS + "elementwise.elementwise.fused_gate_sigmoid_mul_add": fused.fused_gate_sigmoid_mul_add,
    _OPS + "mamba.triton_ops.ssd_combined.mamba_chunk_scan_combined": mamba2.mamba_chunk_scan_combined,
    _OPS + "mamba.triton_ops.ssu_dispatch.selective_state_update": mamba2.selective_state_update,
    _SCATTER + "track_mamba_states_if_needed": checkpoint.track_states,
    _SCATTER + "track_mamba_states_all_layers": checkpoint.track_states_all_layers,
}
"""Functions that launch a Triton kernel whatever the device is -> what runs in their place."""

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
_PAGES = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."
WRAPPED: dict[str, Callable[..., Any]] = {
    _ATTENTION + "_run_sdpa_forward_extend": attention.extend,
    _PAGES + "alloc_extend": pages.alloc_extend,
    _PAGES + "alloc_decode": pages.alloc_decode,
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode": pinning.without_pinning,
}

MIXER = "sglang.srt.layers.attention.mamba.mamba"
BOUND: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv.causal_conv1d_fn,
    "causal_conv1d_fn_triton": causal_conv.causal_conv1d_fn,
    "causal_conv1d_update": causal_conv.causal_conv1d_update,
    "causal_conv1d_update_triton": causal_conv.causal_conv1d_update,
}
"""Names the Mamba-2 mixer calls but imports on other platforms only; there is nothing to hook until they exist."""


def register() -> list[str]:
    """Register every hook with SGLang's HookRegistry and return their targets; SGLang applies them later."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    replaced = {**REPLACED, **_extra_buffer_door(), **host_tier.bind()}
    for target, function in replaced.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    for target, function in WRAPPED.items():
        HookRegistry.register(target, function, HookType.AROUND)
    corrected = granite.targets()
    for target in corrected:
        HookRegistry.register(target, granite.drop_added_residual, HookType.AFTER)
    mixer = importlib.import_module(MIXER)
    for name, function in BOUND.items():
        if not hasattr(mixer, name):
            setattr(mixer, name, function)
    return [*replaced, *WRAPPED, *corrected]


def _extra_buffer_door() -> dict[str, Callable[..., Any]]:
    """The narrowest place where this version of SGLang asks whether the platform can checkpoint."""
    validator = compat.extra_buffer_validator_path()
    if validator.startswith("sglang.srt.server_args."):
        return {validator: extra_buffer.validate_method}
    module_name = validator.rpartition(".")[0]
    if hasattr(importlib.import_module(module_name), "_platform_supports_mamba_cache_extra_buffer"):
        name = f"{module_name}._platform_supports_mamba_cache_extra_buffer"
        return {name: extra_buffer.platform_supports_extra_buffer}
    return {validator: extra_buffer.validate}
