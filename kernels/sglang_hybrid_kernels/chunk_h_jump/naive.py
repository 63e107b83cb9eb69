"""The specification of chunk_h_jump: one chunk after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_hybrid_kernels.chunk_h_jump.check import Plan
from sglang_hybrid_kernels.compose.check import Operators
from sglang_hybrid_kernels.compose.naive import applied, operator


def chunk_h_jump(plan: Plan, chunks: int) -> tuple[Tensor, Tensor]:
    """See sglang_hybrid_kernels.chunk_h_jump; computes in fp32, or in fp64 if the state or the tokens are fp64."""
    wide = torch.promote_types(torch.promote_types(plan.state.dtype, plan.u.dtype), torch.float32)
    h = plan.k.new_zeros(chunks, *plan.state.shape[1:])
    v_new = plan.u if plan.w is None else plan.u.clone()
    layered = _one_layer(plan.operators)
    bounds, request_rows, done = plan.cu_seqlens.tolist(), plan.request_rows.tolist(), 0
    for request, slot in enumerate(plan.slots.tolist()):
        state = plan.state[slot].to(wide) if slot >= 0 else torch.zeros_like(plan.state[0], dtype=wide)
        for row in range(request_rows[request], request_rows[request + 1]):
            entry = int(plan.jump[row])
            if entry >= 0:
                transition, end_state = operator(layered, entry, wide)
                state = (applied(state[None], transition) + end_state)[0]
            for start in range(bounds[row], bounds[row + 1], plan.chunk_size):
                chunk = slice(start, min(start + plan.chunk_size, bounds[row + 1]))
                h[done] = state.to(h.dtype)
                done += 1
                state = _after(plan, state, chunk, v_new)
        if slot >= 0:
            plan.state[slot] = state.to(plan.state.dtype)
    return h, v_new


def _after(plan: Plan, state: Tensor, chunk: slice, v_new: Tensor) -> Tensor:
    """The state [heads, V, K] after a chunk; its corrected values go into v_new."""
    k, u, g = (x[chunk].to(state.dtype) for x in (plan.k, plan.u, plan.g))
    if plan.w is not None:
        u = u - torch.einsum("thk,hvk->thv", plan.w[chunk].to(state.dtype), state)
        v_new[chunk] = u.to(v_new.dtype)
    k = k.repeat_interleave(state.shape[0] // k.shape[1], 1)
    end = g[-1]
    if not plan.per_channel:
        u = u * (end - g).exp()[..., None]
        end = end[:, None]
    return state * end.exp()[:, None, :] + torch.einsum("thv,thk->hvk", u, k)


def _one_layer(operators: Operators) -> Operators:
    """With a leading dimension of layers; a pool of rows has none."""
    pool = () if operators.transition_rows is None else ("transition", "transition_scale")
    named = vars(operators).items()
    return Operators(**{name: x if x is None or name in pool else x[None] for name, x in named})
