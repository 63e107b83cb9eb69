"""The specification of conv_window_at."""

from __future__ import annotations

import torch

from sglang_hybrid_kernels.conv_window_at.check import Plan


def conv_window_at(plan: Plan) -> None:
    """See sglang_hybrid_kernels.conv_window_at."""
    bounds = plan.cu_seqlens.tolist()
    window = plan.into.shape[2]
    starts = [-1] * len(bounds) if plan.initial_slots is None else plan.initial_slots.tolist()
    for sequence, position, slot in zip(*(x.tolist() for x in (plan.sequence, plan.position, plan.slots)), strict=True):
        exists = 0 <= slot < plan.into.shape[0] and 0 <= sequence < len(bounds) - 1
        if not exists or not 0 <= position <= bounds[sequence + 1] - bounds[sequence]:
            continue
        last = bounds[sequence] + position
        recent = plan.x[max(bounds[sequence], last - window) : last].mT
        old = window - recent.shape[1]
        if old and plan.initial is not None and 0 <= starts[sequence] < plan.initial.shape[0]:
            before = plan.initial[starts[sequence], :, position : position + old]
        else:
            before = recent.new_zeros(recent.shape[0], old)
        plan.into[slot] = torch.cat([before.to(plan.into.dtype), recent.to(plan.into.dtype)], 1)
