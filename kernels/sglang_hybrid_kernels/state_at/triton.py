"""Triton kernels of state_at; one program holds some rows of one head's state in registers.

`walk_kernel` follows the delta rule token by token: at most a chunk of them, and nothing but k, v, g and beta is read.
`product_kernel` serves rules whose written values are known: one product of the chunk's tokens, masked at the position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_hybrid_kernels.arguments import require_grid
from sglang_hybrid_kernels.chunk import NORM_EPSILON
from sglang_hybrid_kernels.state_at.check import Plan

INDICES = ["cu_seqlens", "sequence", "position", "slots"]
"""Arguments whose alignment makes no other kernel: nothing is compiled in the middle of serving."""


@triton.jit
def _locate(cu_seqlens, sequence, position, slots, n, sequences, into_slots, CHUNK: tl.constexpr):
    """Chunk index, first token and number of tokens to follow for request n, its slot, and whether it exists."""
    slot = tl.load(slots + n).to(tl.int64)
    row = tl.load(sequence + n).to(tl.int64)
    at = tl.load(position + n).to(tl.int64)
    exists = (slot >= 0) & (slot < into_slots) & (row >= 0) & (row < sequences)
    row = tl.where(exists, row, 0)
    before = tl.zeros([64], tl.int64)
    for first in range(0, row, 64):
        some = first + tl.arange(0, 64)
        lo = tl.load(cu_seqlens + some, mask=some < row, other=0).to(tl.int64)
        hi = tl.load(cu_seqlens + some + 1, mask=some < row, other=0).to(tl.int64)
        before += (hi - lo + CHUNK - 1) // CHUNK
    lo = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - lo
    exists = exists & (length > 0) & (at >= 0) & (at <= length)
    chunk = tl.minimum(at // CHUNK, (length + CHUNK - 1) // CHUNK - 1)
    return tl.sum(before) + chunk, lo + chunk * CHUNK, (at - chunk * CHUNK).to(tl.int32), slot, exists


@triton.jit
def _token(p_k, p_v, p_g, p_beta, o_k, in_k, in_v, some, DIAGONAL: tl.constexpr, HAS_BETA: tl.constexpr):
    """Key, value, logarithm of the decay and strength of a token in float32; nothing is read unless `some`."""
    key = tl.load(p_k, mask=in_k & some, other=0.0).to(tl.float32)
    value = tl.load(p_v, mask=in_v & some, other=0.0).to(tl.float32)
    if DIAGONAL:
        decay = tl.load(p_g + o_k, mask=in_k & some, other=0.0).to(tl.float32)
    else:
        decay = tl.load(p_g, mask=some, other=0.0).to(tl.float32)
    strength = tl.load(p_beta, mask=some, other=0.0).to(tl.float32) if HAS_BETA else 1.0
    return key, value, decay, strength


@triton.jit(do_not_specialize=["sequences", "into_slots"], do_not_specialize_on_alignment=INDICES)
def walk_kernel(
    h, k, v, g, beta, cu_seqlens, sequence, position, into, slots, sequences, into_slots,
    h_chunk, h_head, h_row, k_token, k_head, v_token, v_head, v_row, g_token, g_head, beta_token, beta_head,
    into_slot, into_head, into_row, epsilon,
    V, K, GROUP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DIAGONAL: tl.constexpr, HAS_BETA: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """grid [V / ROWS, heads, n]."""
    head = tl.program_id(1).to(tl.int64)
    chunk, first, count, slot, exists = _locate(
        cu_seqlens, sequence, position, slots, tl.program_id(2), sequences, into_slots, CHUNK
    )
    if exists:
        o_v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        o_k = tl.arange(0, COLUMNS)
        in_k, in_v = o_k < K, o_v < V
        inside = in_v[:, None] & in_k[None, :]
        state = tl.load(
            h + chunk * h_chunk + head * h_head + o_v[:, None] * h_row + o_k[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        p_k = k + first * k_token + (head // GROUP) * k_head + o_k
        p_v = v + first * v_token + head * v_head + o_v * v_row
        p_g = g + first * g_token + head * g_head
        p_beta = beta + first * beta_token + head * beta_head
        # The next token is on its way while this one is applied: a load takes longer than all of its arithmetic.
        following = _token(p_k, p_v, p_g, p_beta, o_k, in_k, in_v, count > 0, DIAGONAL, HAS_BETA)
        for at in range(count):
            key, value, decay, strength = following
            p_k += k_token
            p_v += v_token
            p_g += g_token
            p_beta += beta_token
            following = _token(p_k, p_v, p_g, p_beta, o_k, in_k, in_v, at + 1 < count, DIAGONAL, HAS_BETA)
            if L2NORM:
                key *= tl.rsqrt(tl.sum(key * key) + epsilon)
            state *= tl.exp(decay)[None, :] if DIAGONAL else tl.exp(decay)
            value = (value - tl.sum(state * key[None, :], 1)) * strength
            state += value[:, None] * key[None, :]
        p_into = into + slot * into_slot + head * into_head + o_v[:, None] * into_row + o_k[None, :]
        tl.store(p_into, state.to(into.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "into_slots"], do_not_specialize_on_alignment=INDICES)
def product_kernel(
    h, k, v, g, beta, cu_seqlens, sequence, position, into, slots, sequences, into_slots,
    h_chunk, h_head, h_row, k_token, k_head, v_token, v_head, v_row, g_token, g_head, beta_token, beta_head,
    into_slot, into_head, into_row, epsilon,
    V, K, GROUP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DIAGONAL: tl.constexpr, HAS_BETA: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """grid [V / ROWS, heads, n]. Longer chunks take several products of 64 tokens."""
    BLOCK: tl.constexpr = CHUNK if CHUNK < 64 else 64
    head = tl.program_id(1).to(tl.int64)
    chunk, first, count, slot, exists = _locate(
        cu_seqlens, sequence, position, slots, tl.program_id(2), sequences, into_slots, CHUNK
    )
    if exists:
        o_v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        o_k = tl.arange(0, COLUMNS)
        in_k, in_v = o_k < K, o_v < V
        inside = in_v[:, None] & in_k[None, :]
        state = tl.load(
            h + chunk * h_chunk + head * h_head + o_v[:, None] * h_row + o_k[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        o_t = tl.arange(0, BLOCK)
        for begin in range(0, count, BLOCK):
            tokens, follows = first + begin + o_t, begin + o_t < count
            key = tl.load(
                k + tokens[:, None] * k_token + (head // GROUP) * k_head + o_k[None, :],
                mask=follows[:, None] & in_k[None, :],
                other=0.0,
            ).to(tl.float32)
            if L2NORM:
                key *= tl.rsqrt(tl.sum(key * key, 1) + epsilon)[:, None]
            value = tl.load(
                v + tokens[:, None] * v_token + head * v_head + o_v[None, :] * v_row,
                mask=follows[:, None] & in_v[None, :],
                other=0.0,
            ).to(tl.float32)
            if HAS_BETA:
                strength = tl.load(beta + tokens * beta_token + head * beta_head, mask=follows, other=0.0)
                value *= strength.to(tl.float32)[:, None]
            if DIAGONAL:
                log_decay = tl.load(
                    g + tokens[:, None] * g_token + head * g_head + o_k[None, :],
                    mask=follows[:, None] & in_k[None, :],
                    other=0.0,
                ).to(tl.float32)
                whole = tl.sum(log_decay, 0)
                key *= tl.exp(whole[None, :] - tl.cumsum(log_decay, 0))
                state *= tl.exp(whole)[None, :]
            else:
                log_decay = tl.load(g + tokens * g_token + head * g_head, mask=follows, other=0.0).to(tl.float32)
                whole = tl.sum(log_decay, 0)
                value *= tl.exp(whole - tl.cumsum(log_decay, 0))[:, None]
                state *= tl.exp(whole)
            state += tl.dot(tl.trans(value), key, input_precision="tf32x3")
        p_into = into + slot * into_slot + head * into_head + o_v[:, None] * into_row + o_k[None, :]
        tl.store(p_into, state.to(into.dtype.element_ty), mask=inside)


def state_at(plan: Plan) -> None:
    """See sglang_hybrid_kernels.state_at."""
    _, heads, dv, dk = plan.h.shape
    require_grid("positions", plan.position.numel())
    beta = plan.g if plan.beta is None else plan.beta
    columns = max(16, triton.next_power_of_2(dk))
    rows = 8 if plan.delta else 16
    kernel = walk_kernel if plan.delta else product_kernel
    kernel[(triton.cdiv(dv, rows), heads, plan.position.numel())](
        plan.h, plan.k, plan.v, plan.g, beta, plan.cu_seqlens.contiguous(), plan.sequence.contiguous(),
        plan.position.contiguous(), plan.into, plan.slots.contiguous(),
        plan.cu_seqlens.numel() - 1, plan.into.shape[0],
        *plan.h.stride()[:3], *plan.k.stride()[:2], *plan.v.stride(), *plan.g.stride()[:2], *beta.stride()[:2],
        *plan.into.stride()[:3], NORM_EPSILON,
        dv, dk, GROUP=heads // plan.k.shape[1], CHUNK=plan.chunk, ROWS=rows, COLUMNS=columns,
        DIAGONAL=plan.diagonal, HAS_BETA=plan.beta is not None, L2NORM=plan.l2norm,
        num_warps=1 if plan.delta else 8, num_stages=1,
    )  # fmt: skip
