"""Small fused operations that Qwen3-Next and Qwen3.5 call on a CPU without an unfused alternative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fused_sigmoid_mul(x: Tensor, gate: Tensor, inplace: bool = True) -> Tensor:
    """x * sigmoid(gate): attention's output gate; gate may have its heads as a dimension. In place unless told not."""
    gate = gate.reshape(x.shape).sigmoid()
    return x.mul_(gate) if inplace else x * gate


def fused_qk_gemma_rmsnorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """RMS norm per head with weight 1 + w; q, k: [T, heads * head_dim]; returns [T * heads, head_dim] each."""
    return _gemma_rmsnorm(q.reshape(-1, head_dim), q_weight, eps), _gemma_rmsnorm(
        k.reshape(-1, head_dim), k_weight, eps
    )


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for q_gate [T, num_heads * 2 * head_dim], each head's gate behind its query; also returns the gates."""
    q, gate = q_gate.reshape(-1, 2 * head_dim).split(head_dim, dim=-1)
    q, k = fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.contiguous()


def _gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return y.mul_(1.0 + weight.float()).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split [T, q | k | v | z] and [T, b | a] into qkv [T, .], z [T, num_heads_v, head_v], b and a [T, num_heads_v]."""
    value_dim = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + value_dim, value_dim], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv.contiguous(), z.contiguous().view(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """The gated shared expert: final_hidden_states += sigmoid(hidden_states w) shared_output; all [T, D], w of D."""
    gate = torch.mv(hidden_states.float(), gate_weight.float().flatten()).sigmoid_().unsqueeze(-1)
    final_hidden_states += (gate * shared_output.float()).to(final_hidden_states.dtype)


def scale_in_router(_: None, experts: Any, *__: Any, **___: Any) -> None:
    """AFTER hook of KimiMoE.__init__: the router applies `routed_scaling_factor`, which experts on a CPU leave out."""
    experts.topk.topk_config.apply_routed_scaling_factor_on_output = True
