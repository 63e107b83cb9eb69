"""The specification of rerotate_scatter."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_hybrid_kernels.rerotate_scatter.check import Plan


def rerotate_scatter(plan: Plan) -> None:
    """See sglang_hybrid_kernels.rerotate_scatter; turns in fp32, or in fp64 if the keys are."""
    used = (plan.source >= 0) & (plan.destination >= 0)
    read, written = plan.source[used].long(), plan.destination[used].long()
    cos, sin = (x[plan.segments()[used], None] for x in plan.rotation())
    for source, destination in zip(plan.source_k, plan.destination_k, strict=True):
        destination[written] = turned(source[read], cos, sin, plan.interleaved)
    for source, destination in zip(plan.source_v, plan.destination_v, strict=True):
        destination[written] = source[read]


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] with pair i of its first 2 n dimensions turned by the angle of cos, sin [..., n]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b, cos, sin = x[..., first].to(wide), x[..., second].to(wide), cos.to(wide), sin.to(wide)
    out = x.clone()
    out[..., first] = (a * cos - b * sin).to(x.dtype)
    out[..., second] = (b * cos + a * sin).to(x.dtype)
    return out
