"""The stand-in for `sgl_kernel`: the compiled CPU extension is on no registry and needs AMX.

Holds just the names that SGLang's CPU path touches. Other names must stay absent: SGLang falls back on ImportError.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.engine.cpu import causal_conv, fused, gdn
from sglang_hybrid.engine.cpu.speculation import kv_slots, sampling, trees

_OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "fused_gdn_gating_cpu": (
        "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        gdn.gating,
    ),
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor? cu_seqlens=None, "
        "bool use_qk_l2norm_in_kernel=True, float softplus_beta=1.0, float softplus_threshold=20.0, "
        "bool is_kda=False, bool disable_state_update=False, Tensor(b!)? intermediate_states_buffer=None, "
        "Tensor? intermediate_state_indices=None, int cache_steps=0, Tensor? retrieve_parent_token=None) -> Tensor",
        gdn.recurrent_gated_delta_rule,
    ),
    "fused_sigmoid_mul_cpu": (
        "(Tensor(a!) x, Tensor gate, bool inplace=True) -> Tensor(a!)",
        fused.fused_sigmoid_mul,
    ),
    "fused_qk_gemma_rmsnorm_cpu": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)",
        fused.fused_qk_gemma_rmsnorm,
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": (
        "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, int num_heads) "
        "-> (Tensor, Tensor, Tensor)",
        fused.fused_qk_gemma_rmsnorm_with_gate,
    ),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": (
        "(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, int head_v) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        fused.fused_qkvzba_split_reshape_cat_contiguous,
    ),
}
"""torch.ops.sgl_kernel: name -> (schema, implementation)."""

_SPECULATION = {
    "assign_draft_cache_locs_contiguous_cpu": kv_slots.assign_draft_cache_locs_contiguous,
    "assign_extend_cache_locs_cpu": kv_slots.assign_extend_cache_locs,
    "build_tree_kernel_efficient_cpu": trees.build_tree_kernel_efficient,
    "copy_all_layer_kv_cache_cpu": kv_slots.copy_all_layer_kv_cache,
    "fill_accept_out_cache_loc_cpu": kv_slots.fill_accept_out_cache_loc,
    "fill_bonus_tokens_cpu": kv_slots.fill_bonus_tokens,
    "top_k_renorm_prob": sampling.top_k_renorm_prob,
    "top_p_renorm_prob": sampling.top_p_renorm_prob,
    "tree_speculative_sampling_target_only": sampling.tree_speculative_sampling_target_only,
    "verify_tree_greedy_cpu": trees.verify_tree_greedy,
}
"""Names in sgl_kernel itself that speculative decoding imports on a CPU."""

_libraries: list[torch.library.Library] = []


def is_real() -> bool:
    """Whether an installed sgl_kernel brings SGLang's own CPU kernels."""
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        return False
    try:
        from sgl_kernel.mamba import chunk_gated_delta_rule_cpu
    except Exception:  # a CUDA build on a machine without CUDA fails in many ways
        return False
    return chunk_gated_delta_rule_cpu is not gdn.chunk_gated_delta_rule


def install() -> None:
    """Put the stand-in where `import sgl_kernel` finds it; a second call changes nothing."""
    if _libraries:
        return
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name, (schema, implementation) in _OPERATORS.items():
        library.define(name + schema)
        library.impl(name, implementation, "CPU")
    _libraries.append(library)
    root = _module(
        "sgl_kernel", __version__="0+sglang-hybrid", assign_req_to_token_pool_cpu=assign_req_to_token_pool,
        __getattr__=_unavailable, **_SPECULATION,
    )  # fmt: skip
    root.__dict__["speculative"] = _module(
        "sgl_kernel.speculative",
        reconstruct_indices_from_tree_mask=trees.reconstruct_indices_from_tree_mask,
    )
    root.__dict__["mamba"] = _module(
        "sgl_kernel.mamba",
        causal_conv1d_fn_cpu=causal_conv.causal_conv1d_fn,
        causal_conv1d_update_cpu=causal_conv.causal_conv1d_update,
        chunk_gated_delta_rule_cpu=gdn.chunk_gated_delta_rule,
    )


def assign_req_to_token_pool(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int | None = None,
) -> None:
    """Write each request's new KV slots, packed in out_cache_loc, into columns start to end of its row."""
    at = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start]
        at += end - start


def _unavailable(name: str) -> Callable[..., Any]:
    """SGLang imports *_cpu names at module level that no model here calls: importable, loud when called."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"the CPU platform has no sgl_kernel.{name}")

    call.__name__ = name
    return call


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module
