"""Gated normalisation where SGLang's CPU path launches a Triton kernel, in both orders of norm and gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GATES = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def rms_norm_gated(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """norm(x) * act(z) if norm_before_gate, else norm(x * act(z)); statistics per group of group_size features.

    x: [..., D] with z of as many elements; weight, bias: [D]. RMS norm if is_rms_norm, else layer norm; in float32.
    """
    gate = None if z is None else _GATES[activation](z.reshape(x.shape).float())
    y = x.float()
    if gate is not None and not norm_before_gate:
        y = y * gate
    grouped = y.unflatten(-1, (-1, group_size or x.shape[-1]))
    if not is_rms_norm:
        grouped = grouped - grouped.mean(-1, keepdim=True)
    scale = grouped.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = (grouped * scale).flatten(-2).mul_(weight.float())
    if bias is not None:
        y += bias.float()
    if gate is not None and norm_before_gate:
        y *= gate
    return y.to(x.dtype)


def fused_rms_norm_gated_forward(
    self: Any,
    x: Tensor,
    g: Tensor,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor:
    """FusedRMSNormGated.forward: norm(x) * weight * act(g); x, g: [..., D]. No hybrid model passes a residual."""
    if residual is not None or prenorm or residual_in_fp32:
        raise NotImplementedError("the CPU platform's gated norm takes no residual")
    return rms_norm_gated(
        x=x, weight=self.weight, bias=self.bias, z=g, eps=self.eps, is_rms_norm=True, activation=self.activation
    )
