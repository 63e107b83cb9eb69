"""The specification of state_at: one chunk per position, whose tokens from the position on do nothing."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sglang_hybrid_kernels.chunk import advanced, normalised, precision, running_decay, values
from sglang_hybrid_kernels.state_at.check import Plan


def state_at(plan: Plan) -> None:
    """See sglang_hybrid_kernels.state_at."""
    bounds = plan.cu_seqlens.tolist()
    counts = [-(-(hi - lo) // plan.chunk) for lo, hi in pairwise(bounds)]
    offsets = list(accumulate(counts, initial=0))
    for sequence, position, slot in zip(*(x.tolist() for x in (plan.sequence, plan.position, plan.slots)), strict=True):
        exists = 0 <= slot < plan.into.shape[0] and 0 <= sequence < len(counts)
        if not exists or not counts[sequence] or not 0 <= position <= bounds[sequence + 1] - bounds[sequence]:
            continue
        chunk = min(position // plan.chunk, counts[sequence] - 1)
        start = plan.h[offsets[sequence] + chunk]
        first = bounds[sequence] + chunk * plan.chunk
        last = bounds[sequence] + position
        plan.into[slot] = start if first == last else _after(plan, start, slice(first, last))


def _after(plan: Plan, start: Tensor, tokens: slice) -> Tensor:
    """The state [heads, V, K] when `tokens` have followed the state `start`."""
    dtype = precision(plan.h, plan.k, plan.v, plan.g, plan.beta)
    repeat = plan.v.shape[1] // plan.k.shape[1]
    k = plan.k[tokens].to(dtype)
    k = (normalised(k) if plan.l2norm else k).repeat_interleave(repeat, 1).transpose(0, 1)
    v = plan.v[tokens].to(dtype).transpose(0, 1)
    g = plan.g[tokens].to(dtype)
    total = running_decay((g if plan.diagonal else g.unsqueeze(-1)).transpose(0, 1))
    beta = torch.ones_like(v[..., :1]) if plan.beta is None else plan.beta[tokens].to(dtype).mT.unsqueeze(-1)
    start = start.to(dtype)
    written = values(k, v, total, beta, start) if plan.delta else beta * v
    return advanced(start, k, written, total)
