"""Triton kernel of chunk_h_jump: one program holds BV rows of one head's state for a whole request.

A jump reads K * K + BV * K stored elements, a chunk chunk_size * (2 K + BV); both are sequential, so the time of a
request is that of its jumps and chunks one after the other, and all heads and blocks of rows run side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_hybrid_kernels.chunk_h_jump.check import Plan
from sglang_hybrid_kernels.compose.triton import (
    FAMILY,
    apply_transition,
    load_end_state,
    operands,
    require_supported,
    split,
)

BLOCK_V = 32

INDICES = ["slots", "cu_seqlens", "request_rows", "chunk_starts", "jump", "t_rows", "decays"]
"""Arguments whose alignment makes no other kernel: nothing is compiled in the middle of serving."""


@triton.jit(do_not_specialize=["heads", "key_heads"], do_not_specialize_on_alignment=INDICES)
def chunk_h_jump_kernel(
    k, w, u, g, v_new, h, state, state_slot, state_head, slots, cu_seqlens, request_rows, chunk_starts, jump,
    decays, transition, t_entry, t_head, t_scale, ts_entry, ts_head, end_state, s_entry, s_head, s_scale, ss_entry,
    ss_head, t_rows, tr_entry, tr_head, heads, key_heads, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, PER_CHANNEL: tl.constexpr, FAMILY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """grid [cdiv(V, BV) * requests * heads], blocks of one head side by side. Transitions that are one number are
    `decays`: they lie as the head does with which they begin."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    request, head = tl.program_id(0) // blocks // heads, (tl.program_id(0) // blocks % heads).to(tl.int64)
    o_k, o_v, o_t = tl.arange(0, K), tl.program_id(0) % blocks * BV + tl.arange(0, BV), tl.arange(0, BT)
    tile, inside = o_v[:, None] * K + o_k[None, :], o_v[:, None] < V
    slot = tl.load(slots + request).to(tl.int64)
    p_state = state + slot * state_slot + head * state_head + tile
    x = tl.load(p_state, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
    for row in range(tl.load(request_rows + request), tl.load(request_rows + request + 1)):
        entry = tl.load(jump + row).to(tl.int64)
        if entry >= 0:
            kept = True
            t_row = entry
            if t_rows is not None:
                t_row = tl.load(t_rows + entry * tr_entry + head * tr_head).to(tl.int64)
                kept = t_row >= 0
            p_t_scale, p_s_scale = t_scale, s_scale
            if t_scale is not None:
                p_t_scale = t_scale + t_row * ts_entry + head * ts_head
            if s_scale is not None:
                p_s_scale = s_scale + entry * ss_entry + head * ss_head
            if kept:
                p_t = (transition if decays is None else decays) + t_row * t_entry + head * t_head
                x = apply_transition(x, p_t, p_t_scale, o_k, K, FAMILY, SPLIT)
            else:
                x = tl.zeros_like(x)
            x += load_end_state(end_state + entry * s_entry + head * s_head, p_s_scale, o_v, o_k, K, V)
        begin, end = tl.load(cu_seqlens + row).to(tl.int64), tl.load(cu_seqlens + row + 1).to(tl.int64)
        p_h = h + (tl.load(chunk_starts + row).to(tl.int64) * heads + head) * V * K + tile
        for chunk in range(0, tl.cdiv(end - begin, BT)):
            t = begin + chunk * BT + o_t
            valid = t < end
            last = tl.minimum(begin + (chunk + 1) * BT, end) - 1
            tl.store(p_h, x.to(h.dtype.element_ty), mask=inside)
            p_h += heads * V * K
            at_v = (t[:, None] * heads + head) * V + o_v[None, :]
            valid_v = valid[:, None] & (o_v[None, :] < V)
            values = tl.load(u + at_v, mask=valid_v, other=0.0).to(tl.float32)
            if w is not None:
                b_w = tl.load(w + (t[:, None] * heads + head) * K + o_k[None, :], mask=valid[:, None], other=0.0)
                values -= tl.dot(b_w, tl.trans(x).to(b_w.dtype), input_precision="tf32x3")
                tl.store(v_new + at_v, values.to(v_new.dtype.element_ty), mask=valid_v)
            if PER_CHANNEL:
                x *= tl.exp(tl.load(g + (last * heads + head) * K + o_k).to(tl.float32))[None, :]
            else:
                g_last = tl.load(g + last * heads + head).to(tl.float32)
                g_here = tl.load(g + t * heads + head, mask=valid, other=0.0).to(tl.float32)
                values *= tl.where(valid, tl.exp(g_last - g_here), 0.0)[:, None]
                x *= tl.exp(g_last)
            key_head = head // (heads // key_heads)
            b_k = tl.load(k + (t[:, None] * key_heads + key_head) * K + o_k[None, :], mask=valid[:, None], other=0.0)
            x += tl.dot(tl.trans(values).to(b_k.dtype), b_k, input_precision="tf32x3")
    tl.store(p_state, x.to(state.dtype.element_ty), mask=inside & (slot >= 0))


def chunk_h_jump(plan: Plan, chunks: int) -> tuple[Tensor, Tensor]:
    """See sglang_hybrid_kernels.chunk_h_jump."""
    k, u, g, state, operators = (
        plan.k.contiguous(),
        plan.u.contiguous(),
        plan.g.contiguous(),
        plan.state,
        plan.operators,
    )
    w = None if plan.w is None else plan.w.contiguous()
    _, heads, v, key_dim = state.shape
    require_supported(operators, key_dim, state.dtype, k.dtype, u.dtype, g.dtype)
    h = k.new_empty(chunks, heads, v, key_dim)
    v_new = plan.u if w is None else torch.empty_like(u)
    if not plan.slots.numel() or not state.numel():
        return h, v_new
    counts = plan.chunk_counts()
    transition, *entries = operands(operators, 2)
    transitions = (transition, None) if operators.family == "scalar" else (None, transition)
    wide = plan.chunk_size > 32 or operators.transition.dtype == torch.float32  # else registers spill
    block = min(BLOCK_V, max(16, triton.next_power_of_2(v)))
    chunk_h_jump_kernel[(triton.cdiv(v, block) * plan.slots.numel() * heads,)](
        *(k, w, u, g, v_new, h, state, *state.stride()[:2], plan.slots.contiguous(), plan.cu_seqlens.contiguous()),
        *(plan.request_rows.contiguous(), counts.cumsum(0) - counts, plan.jump.contiguous()),
        *(*transitions, *entries),
        heads=heads,
        key_heads=k.shape[1],
        K=key_dim,
        V=v,
        BT=plan.chunk_size,
        BV=block,
        PER_CHANNEL=plan.per_channel,
        FAMILY=FAMILY[operators.family],
        SPLIT=split(operators),
        num_warps=8 if wide else 4,
        num_stages=2,
    )
    return h, v_new
