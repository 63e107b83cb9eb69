"""Triton kernels of seam_attention.

A program takes BM rows, a row being one query of one head that shares the key head, and one part of PART keys. Where
requests may have several parts, each writes its softmax with its logarithmic sum, and a second kernel joins them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_hybrid_kernels.arguments import require, require_grid
from sglang_hybrid_kernels.seam_attention.check import Plan

PART = 2048
"""Keys of one program: fixed, for the order of sums must not depend on the batch."""

LARGEST_SIZE = 256

MOST_PARTIAL = 1 << 26
"""Numbers that wait to be joined at once, 256 MiB; all of 8,192 queries over 262,144 keys would take 16 GiB."""

INDICES = ["pages", "page_offsets", "positions", "query_offsets", "block_ends"]
"""Arguments whose alignment makes no other kernel: nothing is compiled in the middle of serving."""


@triton.jit(do_not_specialize=["requests", "tokens"], do_not_specialize_on_alignment=INDICES)
def attend_kernel(
    q, k, v, pages, page_offsets, positions, query_offsets, block_ends, requests, out, sums, tokens, heads, factor,
    window, q_token, q_head, k_slot, k_head, v_slot, v_head,
    D: tl.constexpr, DV: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    PART: tl.constexpr, SINGLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """grid [blocks, kv_heads, parts]. out [parts, tokens, heads, DV] and sums [parts, tokens, heads], base 2."""
    block, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tl.zeros([], tl.int32)  # the first whose blocks end behind this one
    for some in range(0, requests, 64):
        o_r = some + tl.arange(0, 64)
        ends = tl.load(block_ends + o_r, mask=o_r < requests, other=block + 1)
        request += tl.sum((ends <= block).to(tl.int32))
    if request < requests:
        before = tl.load(block_ends + request - 1, mask=request > 0, other=0)
        first, end = tl.load(query_offsets + request), tl.load(query_offsets + request + 1)
        row = (block - before) * BM + tl.arange(0, BM)
        token, head = (first + row // GROUPS).to(tl.int64), kv_head * GROUPS + row % GROUPS
        valid = token < end
        position = tl.load(positions + token, mask=valid, other=-1).to(tl.int32)
        o_d, o_v = tl.arange(0, BD), tl.arange(0, BDV)
        p_q = q + (token * q_token + head * q_head)[:, None] + o_d[None, :]
        b_q = tl.load(p_q, mask=valid[:, None] & (o_d[None, :] < D), other=0.0)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BDV], tl.float32)
        begin = part * PART
        stop = tl.minimum(begin + PART, tl.max(position) + 1)
        if WINDOW:
            lowest = tl.min(tl.where(position >= 0, position, 2147483647))
            begin += tl.maximum(lowest - window + 1 - begin, 0) // BN * BN
        p_page = pages + tl.load(page_offsets + request)
        for start in range(begin, stop, BN):
            key = start + tl.arange(0, BN)
            inside = key < stop
            slot = tl.load(p_page + key // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
            seen = (key[None, :] <= position[:, None]) & inside[None, :]
            if WINDOW:
                seen &= key[None, :] > position[:, None] - window
            if (not WINDOW) or tl.max(seen.to(tl.int32)) > 0:
                p_k = k + kv_head.to(tl.int64) * k_head + slot[None, :] * k_slot + o_d[:, None]
                b_k = tl.load(p_k, mask=inside[None, :] & (o_d[:, None] < D), other=0.0)
                score = tl.where(seen, tl.dot(b_q, b_k, input_precision="tf32x3") * factor, float("-inf"))
                higher = tl.maximum(top, tl.max(score, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                weight = tl.exp2(score - base[:, None])
                kept = tl.exp2(top - base)
                total = total * kept + tl.sum(weight, 1)
                p_v = v + kv_head.to(tl.int64) * v_head + slot[:, None] * v_slot + o_v[None, :]
                b_v = tl.load(p_v, mask=inside[:, None] & (o_v[None, :] < DV), other=0.0)
                acc = acc * kept[:, None] + tl.dot(weight.to(b_v.dtype), b_v, input_precision="tf32x3")
                top = higher
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = (part.to(tl.int64) * tokens + token) * heads + head
        written = valid[:, None] & (o_v[None, :] < DV)
        if SINGLE or begin < stop:
            tl.store(out + place[:, None] * DV + o_v[None, :], result.to(out.dtype.element_ty), mask=written)
        if not SINGLE:
            tl.store(sums + place, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=valid)


@triton.jit(do_not_specialize=["rows", "parts"])
def join_kernel(partial, sums, out, rows, parts, DV: tl.constexpr, BM: tl.constexpr, BDV: tl.constexpr):
    """grid [cdiv(rows, BM)]; partial [parts, rows, DV], joined in order. A part without weight was not written."""
    row, o_v = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, BDV)
    valid, tile = (row < rows)[:, None] & (o_v[None, :] < DV), row[:, None] * DV + o_v[None, :]
    top = tl.full([BM], float("-inf"), tl.float32)
    for part in range(parts):
        top = tl.maximum(top, tl.load(sums + part * rows + row, mask=row < rows, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total, acc = tl.zeros([BM], tl.float32), tl.zeros([BM, BDV], tl.float32)
    for part in range(parts):
        weight = tl.exp2(tl.load(sums + part * rows + row, mask=row < rows, other=float("-inf")) - top)
        total += weight
        one = tl.load(partial + part * rows * DV + tile, mask=valid & (weight > 0)[:, None], other=0.0)
        acc += weight[:, None] * one
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + tile, result.to(out.dtype.element_ty), mask=valid)


def seam_attention(plan: Plan) -> Tensor:
    """See sglang_hybrid_kernels.seam_attention."""
    q, value_size = plan.q, plan.v.shape[2]
    tokens, heads, size = q.shape
    require(q.dtype != torch.float64, "take fp32, bf16 or fp16 for Triton, or the naive path for fp64", q.dtype)
    largest = max(size, value_size)
    require(largest <= LARGEST_SIZE, f"Triton takes heads of up to {LARGEST_SIZE} dimensions", largest)
    out = q.new_empty(tokens, heads, value_size)
    if not out.numel():
        return out
    parts = max(1, triton.cdiv(plan.most_keys, PART))
    require_grid(f"keys of one request, in parts of {PART},", parts)
    most = tokens if parts == 1 else max(1, MOST_PARTIAL // (parts * heads * value_size))
    for first in range(0, tokens, most):
        some = slice(first, min(first + most, tokens))
        bounds = plan.query_offsets if most >= tokens else plan.query_offsets.clamp(first, some.stop) - first
        _attend(plan, q[some], plan.positions[some], bounds, parts, out[some])
    return out


def _attend(plan: Plan, q: Tensor, positions: Tensor, query_offsets: Tensor, parts: int, out: Tensor) -> None:
    """Of some queries, all at once."""
    k, v = plan.k, plan.v
    (tokens, heads, size), (_, kv_heads, value_size) = q.shape, v.shape
    groups, requests = heads // kv_heads, plan.page_offsets.numel() - 1
    indices = (plan.pages, plan.page_offsets, positions, query_offsets)
    pages, page_offsets, positions, query_offsets = (index.contiguous() for index in indices)
    if parts > 1:
        partial = torch.empty(parts, tokens, heads, value_size, dtype=torch.float32, device=q.device)
        sums = torch.empty(parts, tokens, heads, dtype=torch.float32, device=q.device)
    else:
        partial = sums = out
    largest = max(size, value_size)
    wide, full = largest > 128, q.dtype == torch.float32  # fp32 keys and their TF32 x 3 parts fill the shared memory
    block = 64
    block_ends = ((query_offsets.diff() * groups + block - 1) // block).cumsum(0)
    blocks = tokens * groups // block + requests
    attend_kernel[(blocks, kv_heads, parts)](
        *(q, k, v, pages, page_offsets, positions, query_offsets, block_ends, requests),
        *(partial, sums, tokens, heads, plan.factor * math.log2(math.e), plan.window or 0),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        D=size,
        DV=value_size,
        GROUPS=groups,
        PAGE=plan.page_size,
        WINDOW=plan.window is not None,
        PART=PART,
        SINGLE=parts == 1,
        BM=block,
        BN=(32 if wide else 64) // (2 if full else 1),
        BD=max(16, triton.next_power_of_2(size)),
        BDV=max(16, triton.next_power_of_2(value_size)),
        num_warps=8 if wide or full else 4,
        num_stages=1 if full else 2,
    )
    if parts > 1:
        rows = tokens * heads
        constants = {"DV": value_size, "BM": 16, "BDV": triton.next_power_of_2(value_size)}
        join_kernel[(triton.cdiv(rows, 16),)](partial, sums, out, rows, parts, **constants)
