"""Triton kernels of `compose`.

Cost per segment, layer and head: K * K + V * K stored elements read once, 2 V K K flops for a dense transition. The
state, [BV, K] in fp32, never leaves the registers. Of bf16 and int8 transitions every element is exact in bf16, so the
product takes two bf16 passes over the state's high and low halves (relative error 2^-17); fp32 takes TF32 x 3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_hybrid_kernels.arguments import require
from sglang_hybrid_kernels.compose.check import Operators, Plan

SCALAR, DIAGONAL, DENSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FAMILY = {"scalar": SCALAR, "diagonal": DIAGONAL, "dense": DENSE}
LARGEST_DENSE_K = 128
LARGEST_K = 256


@triton.jit
def apply_transition(x, t, t_scale, o_k, K: tl.constexpr, FAMILY: tl.constexpr, SPLIT: tl.constexpr):
    """T x for state rows x [BV, K]: t points at one entry's and head's transition, t_scale at its scale or is None."""
    if FAMILY == SCALAR:
        x = x * tl.load(t).to(tl.float32)
    elif FAMILY == DIAGONAL:
        x = x * tl.load(t + o_k).to(tl.float32)[None, :]
    else:
        tile = tl.load(t + o_k[:, None] * K + o_k[None, :])
        if SPLIT:
            tile = tile.to(tl.bfloat16)
            high = x.to(tl.bfloat16)
            low = (x - high.to(tl.float32)).to(tl.bfloat16)
            x = tl.dot(low, tile)
            x = tl.dot(high, tile, x)
        else:
            x = tl.dot(x, tile.to(tl.float32), input_precision="tf32x3")
    if t_scale is not None:
        x = x * tl.load(t_scale + o_k).to(tl.float32)[None, :]
    return x


@triton.jit
def load_end_state(s, s_scale, o_v, o_k, K: tl.constexpr, V: tl.constexpr):
    """Rows o_v of S_C in fp32: s points at one entry's and head's end state, s_scale at its scale or is None."""
    x = tl.load(s + o_v[:, None] * K + o_k[None, :], mask=o_v[:, None] < V, other=0.0).to(tl.float32)
    if s_scale is not None:
        x = x * tl.load(s_scale + o_k).to(tl.float32)[None, :]
    return x


@triton.jit
def _last_without_transition(first, end, layer, head, chain, t_rows, tr_layer, tr_entry, tr_head):
    """(i, row): the last i in first:end with a negative row for chain[i]; else i = first and a row that is not."""
    i, row = end, tl.full((), 0, tl.int64)
    while (i > first) & (row >= 0):
        i -= 1
        row = tl.load(t_rows + layer * tr_layer + tl.load(chain + i).to(tl.int64) * tr_entry + head * tr_head)
        row = row.to(tl.int64)
    return i, row


@triton.jit
def _carried(
    x, first, end, is_state, o_v, o_k, layer, head, chain,
    transition, t_layer, t_entry, t_head, t_scale, ts_layer, ts_entry, ts_head,
    end_state, s_layer, s_entry, s_head, s_scale, ss_layer, ss_entry, ss_head, t_rows, tr_layer, tr_entry, tr_head,
    K: tl.constexpr, V: tl.constexpr, FAMILY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """x after chain[first:end]; the end states are added where is_state.

    Nothing is left of what comes before a segment without a transition, so the loop begins behind the last of these:
    that nothing depends on a row in the loop keeps its loads ahead of its products.
    """
    if t_rows is not None:
        last, row = _last_without_transition(first, end, layer, head, chain, t_rows, tr_layer, tr_entry, tr_head)
        if row < 0:
            x = tl.zeros_like(x)
            if is_state:
                entry = tl.load(chain + last).to(tl.int64)
                p_end_scale = s_scale
                if s_scale is not None:
                    p_end_scale = s_scale + layer * ss_layer + entry * ss_entry + head * ss_head
                p_s = end_state + layer * s_layer + entry * s_entry + head * s_head
                x += load_end_state(p_s, p_end_scale, o_v, o_k, K, V)
            first = last + 1
    for i in range(first, end):
        entry = tl.load(chain + i).to(tl.int64)
        t_row = entry
        if t_rows is not None:
            t_row = tl.load(t_rows + layer * tr_layer + entry * tr_entry + head * tr_head).to(tl.int64)
        p_scale = t_scale
        if t_scale is not None:
            p_scale = t_scale + layer * ts_layer + t_row * ts_entry + head * ts_head
        p_end_scale = s_scale
        if s_scale is not None:
            p_end_scale = s_scale + layer * ss_layer + entry * ss_entry + head * ss_head
        p_t = transition + layer * t_layer + t_row * t_entry + head * t_head
        x = apply_transition(x, p_t, p_scale, o_k, K, FAMILY, SPLIT)
        if is_state:
            p_s = end_state + layer * s_layer + entry * s_entry + head * s_head
            x += load_end_state(p_s, p_end_scale, o_v, o_k, K, V)
    return x


@triton.jit
def compose_kernel(
    pool, p_layer, p_slot, p_head, source, destination, chain, offsets, layers, heads,
    transition, t_layer, t_entry, t_head, t_scale, ts_layer, ts_entry, ts_head,
    end_state, s_layer, s_entry, s_head, s_scale, ss_layer, ss_entry, ss_head, t_rows, tr_layer, tr_entry, tr_head,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, FAMILY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One block of BV state rows of one head, layer and row. Blocks of a head are neighbours: they share T in L2."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head = ((pid // blocks) % heads).to(tl.int64)
    layer = ((pid // blocks // heads) % layers).to(tl.int64)
    row = pid // blocks // heads // layers
    written = tl.load(destination + row).to(tl.int64)
    if written >= 0:
        o_k, o_v = tl.arange(0, K), (pid % blocks) * BV + tl.arange(0, BV)
        tile = o_v[:, None] * K + o_k[None, :]
        inside = o_v[:, None] < V
        slot = tl.load(source + row).to(tl.int64)
        base = pool + layer * p_layer + head * p_head
        x = tl.load(base + slot * p_slot + tile, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
        x = _carried(
            x, tl.load(offsets + row), tl.load(offsets + row + 1), True, o_v, o_k, layer, head, chain,
            transition, t_layer, t_entry, t_head, t_scale, ts_layer, ts_entry, ts_head,
            end_state, s_layer, s_entry, s_head, s_scale, ss_layer, ss_entry, ss_head,
            t_rows, tr_layer, tr_entry, tr_head, K, V, FAMILY, SPLIT,
        )  # fmt: skip
        tl.store(base + written * p_slot + tile, x.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def fold_kernel(
    out_t, out_s, chain, offsets, layers, heads, groups,
    transition, t_layer, t_entry, t_head, t_scale, ts_layer, ts_entry, ts_head,
    end_state, s_layer, s_entry, s_head, s_scale, ss_layer, ss_entry, ss_head, t_rows, tr_layer, tr_entry, tr_head,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, FAMILY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One block of rows of one part's operator: end-state rows start from zero, transition rows from the identity."""
    state_blocks: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = state_blocks + (K + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % blocks
    head = ((pid // blocks) % heads).to(tl.int64)
    layer = ((pid // blocks // heads) % layers).to(tl.int64)
    part = (pid // blocks // heads // layers).to(tl.int64)
    begin, length = tl.load(offsets + part // groups), tl.load(offsets + part // groups + 1)
    length -= begin
    size = tl.cdiv(length, groups)
    first = begin + tl.minimum((part % groups) * size, length)
    end = begin + tl.minimum((part % groups + 1) * size, length)
    is_state = block < state_blocks
    o_k = tl.arange(0, K)
    o_v = tl.where(is_state, block, block - state_blocks) * BV + tl.arange(0, BV)
    x = tl.where((o_v[:, None] == o_k[None, :]) & (block >= state_blocks), 1.0, 0.0)
    x = _carried(
        x, first, end, is_state, o_v, o_k, layer, head, chain,
        transition, t_layer, t_entry, t_head, t_scale, ts_layer, ts_entry, ts_head,
        end_state, s_layer, s_entry, s_head, s_scale, ss_layer, ss_entry, ss_head,
        t_rows, tr_layer, tr_entry, tr_head, K, V, FAMILY, SPLIT,
    )  # fmt: skip
    cell = (layer * (tl.num_programs(0) // blocks // heads // layers) + part) * heads + head
    tile = o_v[:, None] * K + o_k[None, :]
    if is_state:
        tl.store(out_s + cell * V * K + tile, x, mask=o_v[:, None] < V)
    else:
        tl.store(out_t + cell * K * K + tile, x, mask=o_v[:, None] < K)


def compose(plan: Plan) -> None:
    """Launches one kernel, or two when `tree_groups` > 1."""
    pool, operators, device = plan.pool, plan.operators, plan.pool.device
    layers, _, heads, v, k = pool.shape
    require_supported(operators, k, pool.dtype)
    rows, groups = plan.source.numel(), plan.tree_groups
    chain, offsets = plan.chain.contiguous(), plan.chain_offsets.contiguous()
    source, destination = plan.source.contiguous(), plan.destination.contiguous()
    if groups > 1:
        folded = Operators(
            torch.empty(layers, rows * groups, heads, k, k, dtype=torch.float32, device=device),
            torch.empty(layers, rows * groups, heads, v, k, dtype=torch.float32, device=device),
            *(None, None, None),
        )
        tiles = tiling(operators, v, k)
        blocks = triton.cdiv(v, tiles["BV"]) + triton.cdiv(k, tiles["BV"])
        fold_kernel[(rows * groups * layers * heads * blocks,)](
            *(folded.transition, folded.end_state, chain, offsets, layers, heads, groups),
            *operands(operators, 3),
            **tiles,
        )
        operators = folded
        chain = torch.arange(rows * groups, dtype=torch.int32, device=device)
        offsets = torch.arange(0, rows * groups + 1, groups, dtype=torch.int32, device=device)
    tiles = tiling(operators, v, k)
    compose_kernel[(rows * layers * heads * triton.cdiv(v, tiles["BV"]),)](
        *(pool, *pool.stride()[:3], source, destination, chain, offsets, layers, heads),
        *operands(operators, 3),
        **tiles,
    )


def tiling(operators: Operators, v: int, k: int) -> dict[str, Any]:
    """Constants of a launch. An fp32 tile of T with the halves TF32 x 3 makes of it fills a block's shared memory."""
    rows = 32 if operators.transition.dtype == torch.float32 and operators.family == "dense" else 64
    made = {"K": k, "V": v, "BV": min(rows, triton.next_power_of_2(v)), "FAMILY": FAMILY[operators.family]}
    return {**made, "SPLIT": split(operators), "num_warps": 8, "num_stages": 2}


def require_supported(operators: Operators, k: int, *others: torch.dtype) -> None:
    """Refuses what only the naive path computes. Raises ValueError."""
    for dtype in (operators.transition.dtype, operators.end_state.dtype, *others):
        require(dtype != torch.float64, "take fp32, bf16 or int8 for Triton, or the naive path for fp64", dtype)
    largest = LARGEST_DENSE_K if operators.family == "dense" else LARGEST_K
    fits = k in (16, 32, 64, 128, 256) and k <= largest
    require(fits, f"Triton takes a key dimension K (d_state) that is a power of two in 16..{largest}", k)


def split(operators: Operators) -> bool:
    """Whether every element of the transitions is exact in bf16, so that only states have to be split."""
    return operators.transition.dtype != torch.float32


def operands(operators: Operators, lead: int) -> list[Any]:
    """Each tensor or None, followed by its strides of the `lead` dimensions [layers,] entries, heads. A pool of rows
    takes a row in the entries' place, the same one in every layer and head: strides of 0."""
    made: list[Any] = []
    pooled = operators.transition_rows is not None
    for x, by_row in zip(operators.in_order(), (pooled, pooled, False, False, False), strict=True):
        if x is None:
            made += [None, *(0,) * lead]
        elif by_row:
            made += [x, *(0,) * (lead - 2), x.stride(0), 0]
        else:
            made += [x, *x.stride()[:lead]]
    return made
