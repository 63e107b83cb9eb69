"""The specification of chunk_transition: segment by segment, chunk by chunk, all heads at once.

Every chunk is computed in the same shapes wherever it lies and whatever else is in the batch, so its bits do not depend
on either.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sglang_hybrid_kernels.chunk import CHUNK, advanced, normalised, operators, precision, running_decay
from sglang_hybrid_kernels.chunk_transition.check import Plan


def chunk_transition(plan: Plan) -> None:
    """See sglang_hybrid_kernels.chunk_transition; pools are floating."""
    starts = None if plan.initial_slots is None else plan.initial_slots.tolist()
    for segment, (entry, (lo, hi)) in enumerate(
        zip(plan.entries.tolist(), pairwise(plan.cu_seqlens.tolist()), strict=True)
    ):
        if not 0 <= entry < plan.end_state.shape[0]:
            continue
        dtype = precision(plan.k, plan.v, plan.g, plan.beta)
        state = torch.zeros_like(plan.end_state[entry], dtype=dtype)
        if plan.initial is not None and starts is not None and 0 <= starts[segment] < plan.initial.shape[0]:
            state = plan.initial[starts[segment]].to(dtype)
        state, transition = _segment(plan, state, lo, hi)
        plan.end_state[entry] = state
        if plan.transition is not None:
            plan.transition[entry] = transition
            if plan.vanishing is not None:
                plan.vanishing[entry] = (
                    transition.abs().reshape(transition.shape[0], -1).amax(1) <= plan.vanishing_below
                )


def _segment(plan: Plan, state: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
    """End state [heads, V, K] and transition as it is stored, in the precision of `state`."""
    heads, dk = state.shape[0], state.shape[2]
    operator = torch.eye(dk, dtype=state.dtype, device=state.device).repeat(heads, 1, 1)
    for first in range(lo, hi, CHUNK):
        k, v, total, beta = _chunk(plan, slice(first, min(first + CHUNK, hi)), state.dtype)
        if not plan.delta:
            state = advanced(state, k, beta * v, total)
            continue
        w, u = operators(k, v, total, beta)
        state = advanced(state, k, u - w @ state.mT, total)
        if plan.transition is not None:
            operator = advanced(operator, k, -(w @ operator.mT), total)
    if plan.delta:
        return state, operator
    g = plan.g[lo:hi].to(state.dtype)
    return state, g.sum(0).exp()


def _chunk(plan: Plan, tokens: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k [heads, C, K], v [heads, C, V], running decay [heads, C, 1 or K], beta [heads, C, 1] of some tokens."""
    repeat = plan.v.shape[1] // plan.k.shape[1]
    k = plan.k[tokens].to(dtype)
    k = (normalised(k) if plan.l2norm else k).repeat_interleave(repeat, 1).transpose(0, 1).contiguous()
    v = plan.v[tokens].to(dtype).transpose(0, 1).contiguous()
    g = plan.g[tokens].to(dtype)
    total = running_decay((g if plan.diagonal else g.unsqueeze(-1)).transpose(0, 1).contiguous())
    beta = torch.ones_like(v[..., :1]) if plan.beta is None else plan.beta[tokens].to(dtype).mT.unsqueeze(-1)
    return k, v, total, beta.contiguous()
