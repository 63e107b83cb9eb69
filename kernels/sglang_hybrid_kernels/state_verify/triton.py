"""Triton kernels of state_verify and promote_path: a tree of candidates is one chunk.

With b_n the decay summed from the committed state S down to node n, and m running over the ancestors of n,
    u_n = beta_n (v_n - exp(b_n) S k_n - sum over m of exp(b_n - b_m) (k_m . k_n) u_m)
    out_n = exp(b_n) S q_n + sum over m and n itself of exp(b_n - b_m) (k_m . q_n) u_m
Node by node u is solved for in fp32 registers. Per layer one state is read and none written; promotion reads and writes
one. (A state after each of n candidates would be n writes and n reads.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_hybrid_kernels.arguments import require, require_grid
from sglang_hybrid_kernels.state_verify.check import Promotion, Tree, WindowPromotion

LARGEST_NODES = 64
KEY_DIMS = (16, 32, 64, 128, 256)


@triton.jit
def _times_exact(x, y, SPLIT: tl.constexpr):
    """fp32 x times y; a bf16 y takes two bf16 passes over the halves of x (relative error 2^-17)."""
    if SPLIT:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, y, tl.dot(low, y))
    return tl.dot(x, y.to(tl.float32), input_precision="tf32x3")


@triton.jit
def state_verify_kernel(
    q, k, v, g, beta, pool, pool_slot, pool_head, slots, parent, out, values, nodes, scale,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """grid [cdiv(V, BV), H, requests]."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_n, o_m, o_k = tl.arange(0, BN), tl.arange(0, BN), tl.arange(0, K)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    above = tl.load(parent + request * nodes + o_n, mask=o_n < nodes, other=-2).to(tl.int32)
    real = above > -2
    row = request * nodes + o_n
    at_head = row * H + head
    at_k = ((row * KEY_HEADS + head // (H // KEY_HEADS)) * K)[:, None] + o_k[None, :]
    at_v, real_v = (at_head * V)[:, None] + o_v[None, :], real[:, None] & (o_v[None, :] < V)
    b_k = tl.load(k + at_k, mask=real[:, None], other=0.0)
    b_q = tl.load(q + at_k, mask=real[:, None], other=0.0)
    u = tl.load(v + at_v, mask=real_v, other=0.0).to(tl.float32)
    step = tl.load(g + at_head, mask=real, other=0.0).to(tl.float32)

    # lineage[n, m]: m is n or above it. A parent comes before its children, so rows can be completed in order.
    lineage = (o_n[:, None] == o_m[None, :]).to(tl.int32)
    for node in range(1, nodes):
        its_parent = tl.sum(tl.where(o_n == node, above, 0))
        inherited = tl.sum(tl.where(o_n[:, None] == its_parent, lineage, 0), 0)
        lineage += tl.where(o_n[:, None] == node, inherited[None, :], 0)
    decay = tl.sum(lineage * step[None, :], 1)
    along = tl.sum(tl.where(o_n[:, None] == o_m[None, :], decay[:, None], 0.0), 0)  # decay, over the other axis
    gain = tl.exp(tl.where(lineage > 0, decay[:, None] - along[None, :], float("-inf")))

    slot = tl.load(slots + request).to(tl.int64)
    p_state = pool + slot * pool_slot + head.to(tl.int64) * pool_head + o_v[:, None] * K + o_k[None, :]
    state = tl.load(p_state, mask=(o_v[:, None] < V) & (slot >= 0), other=0.0).to(tl.float32)
    grown = tl.exp(decay)[:, None]
    attention = gain * tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
    result = grown * tl.trans(_times_exact(state, tl.trans(b_q), SPLIT))
    if beta is not None:
        b_beta = tl.load(beta + at_head, mask=real, other=0.0).to(tl.float32)[:, None]
        u = b_beta * (u - grown * tl.trans(_times_exact(state, tl.trans(b_k), SPLIT)))
        inner = tl.where(
            o_n[:, None] != o_m[None, :], b_beta * gain * tl.dot(b_k, tl.trans(b_k), input_precision="tf32x3"), 0.0
        )
        by_node = tl.trans(inner)
        for node in range(1, nodes):
            weights = tl.sum(tl.where(o_n[None, :] == node, by_node, 0.0), 1)
            u -= tl.where(o_n[:, None] == node, tl.sum(weights[:, None] * u, 0)[None, :], 0.0)
    tl.store(values + at_v, u, mask=(o_n < nodes)[:, None] & (o_v[None, :] < V))
    result += tl.dot(attention, u, input_precision="tf32x3")
    result = tl.where(real[:, None], result * scale, 0.0)
    tl.store(out + at_v, result.to(out.dtype.element_ty), mask=(o_n < nodes)[:, None] & (o_v[None, :] < V))


@triton.jit
def promote_path_kernel(
    pool, pool_layer, pool_slot, pool_head, source, destination, k, values, g, parent, accepted, requests, nodes,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """grid [cdiv(V, BV), H, layers * requests]."""
    head, cell = tl.program_id(1), tl.program_id(2).to(tl.int64)
    layer, request = cell // requests, cell % requests
    written = tl.load(destination + request).to(tl.int64)
    if written >= 0:
        o_n, o_m, o_k = tl.arange(0, BN), tl.arange(0, BN), tl.arange(0, K)
        o_v = tl.program_id(0) * BV + tl.arange(0, BV)
        node = tl.load(accepted + request).to(tl.int32)
        passed = tl.zeros([BN], tl.int32)
        for _ in range(nodes):
            passed += (o_n == node).to(tl.int32)
            node = tl.load(parent + request * nodes + node, mask=node >= 0, other=-1).to(tl.int32)
        on_path = passed > 0
        at_head = (cell * nodes + o_n) * H + head
        step = tl.load(g + at_head, mask=on_path, other=0.0).to(tl.float32)
        step_m = tl.sum(tl.where(o_n[:, None] == o_m[None, :], step[:, None], 0.0), 0)
        after = tl.sum(tl.where(o_m[None, :] > o_n[:, None], step_m[None, :], 0.0), 1)
        at_v = (at_head * V)[:, None] + o_v[None, :]
        u = tl.load(values + at_v, mask=on_path[:, None] & (o_v[None, :] < V), other=0.0).to(tl.float32)
        u *= tl.exp(after)[:, None]
        at_k = (((cell * nodes + o_n) * KEY_HEADS + head // (H // KEY_HEADS)) * K)[:, None] + o_k[None, :]
        b_k = tl.load(k + at_k, mask=on_path[:, None], other=0.0)
        slot = tl.load(source + request).to(tl.int64)
        base = pool + layer * pool_layer + head.to(tl.int64) * pool_head + o_v[:, None] * K + o_k[None, :]
        inside = o_v[:, None] < V
        state = tl.load(base + slot * pool_slot, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
        state = state * tl.exp(tl.sum(step)) + _times_exact(tl.trans(u), b_k, SPLIT)
        tl.store(base + written * pool_slot, state.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def promote_window_kernel(
    pool, pool_layer, pool_slot, pool_channel, pool_width, source, destination, inputs, in_layer, in_request, in_node,
    in_channel, parent, accepted, requests, nodes, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [cdiv(channels, BLOCK), layers * requests]. Columns are written oldest first: a later one reads only columns
    that are not written yet, so source and destination may be one slot."""
    layer, request = (tl.program_id(1) // requests).to(tl.int64), tl.program_id(1) % requests
    written, slot = tl.load(destination + request).to(tl.int64), tl.load(source + request).to(tl.int64)
    channel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < channels) & (written >= 0)
    last = tl.load(accepted + request).to(tl.int32)
    depth, node = 0, last
    for _ in range(nodes):
        depth += (node >= 0).to(tl.int32)
        node = tl.load(parent + request * nodes + node, mask=node >= 0, other=-1).to(tl.int32)
    base = pool + layer * pool_layer + channel * pool_channel
    p_inputs = inputs + layer * in_layer + request.to(tl.int64) * in_request + channel * in_channel
    for column in tl.static_range(WIDTH):
        node = last
        for _ in tl.static_range(WIDTH - 1 - column):
            node = tl.load(parent + request * nodes + node, mask=node >= 0, other=-1).to(tl.int32)
        fresh = node >= 0
        p_old = base + slot * pool_slot + (column + depth) * pool_width
        old = tl.load(p_old, mask=inside & (node < 0) & (slot >= 0), other=0.0)
        new = tl.load(p_inputs + node.to(tl.int64) * in_node, mask=inside & fresh, other=0.0)
        tl.store(base + written * pool_slot + column * pool_width, tl.where(fresh, new, old), mask=inside)


def state_verify(tree: Tree) -> tuple[Tensor, Tensor]:
    """See sglang_hybrid_kernels.state_verify."""
    q, k, v, g = (x.contiguous() for x in (tree.q, tree.k, tree.v, tree.g))
    beta = None if tree.beta is None else tree.beta.contiguous()
    out, values = torch.empty_like(v), torch.empty_like(v, dtype=torch.float32)
    _require_supported(tree.pool, tree.k, tree.v, tree.g)
    (requests, nodes, heads, value_dim), key_dim = tree.v.shape, tree.k.shape[3]
    if not out.numel():
        return out, values
    require_grid("requests", requests)
    constants = _constants(tree.k, nodes, heads, value_dim, key_dim)
    state_verify_kernel[(triton.cdiv(value_dim, constants["BV"]), heads, requests)](
        *(q, k, v, g, beta, tree.pool, *tree.pool.stride()[:2]),
        *(tree.slots.contiguous(), tree.parent.contiguous(), out, values, nodes, tree.scale),
        **constants,
    )
    return out, values


def promote_path(promotion: Promotion) -> None:
    """See sglang_hybrid_kernels.state_verify.promote_path."""
    pool, values = promotion.pool, promotion.values
    _require_supported(pool, promotion.k, values, promotion.g)
    (layers, requests, nodes, heads, value_dim), key_dim = values.shape, pool.shape[4]
    if not layers * requests * heads * value_dim * key_dim:
        return
    require_grid("requests", requests, layers)
    tokens = (x.contiguous() for x in (promotion.k, values, promotion.g))
    constants = _constants(promotion.k, max(nodes, 1), heads, value_dim, key_dim)
    promote_path_kernel[(triton.cdiv(value_dim, constants["BV"]), heads, layers * requests)](
        *(pool, *pool.stride()[:3], promotion.source.contiguous(), promotion.destination.contiguous(), *tokens),
        *(promotion.parent.contiguous(), promotion.accepted.contiguous(), requests, nodes),
        **constants,
    )


def promote_window(promotion: WindowPromotion) -> None:
    """See sglang_hybrid_kernels.state_verify.promote_window."""
    pool, inputs = promotion.pool, promotion.inputs
    layers, _, channels, width = pool.shape
    requests, nodes = inputs.shape[1:3]
    if not pool.numel() or not requests:
        return
    require_grid("requests", requests, layers)
    block = min(1024, triton.next_power_of_2(channels))
    promote_window_kernel[(triton.cdiv(channels, block), layers * requests)](
        *(pool, *pool.stride(), promotion.source.contiguous(), promotion.destination.contiguous()),
        *(inputs, *inputs.stride(), promotion.parent.contiguous(), promotion.accepted.contiguous()),
        *(requests, nodes, channels),
        WIDTH=width,
        BLOCK=block,
    )


def _constants(k: Tensor, nodes: int, heads: int, value_dim: int, key_dim: int) -> dict[str, int]:
    require(nodes <= LARGEST_NODES, f"Triton takes up to {LARGEST_NODES} nodes", nodes)
    require(key_dim in KEY_DIMS, f"Triton takes a key dimension K (d_state) among {KEY_DIMS}", key_dim)
    return {
        "H": heads,
        "KEY_HEADS": k.shape[-2],
        "K": key_dim,
        "V": value_dim,
        "BN": max(16, triton.next_power_of_2(nodes)),
        "BV": min(32, max(16, triton.next_power_of_2(value_dim))),
        "SPLIT": k.dtype == torch.bfloat16,
        "num_warps": 8,
    }


def _require_supported(*tensors: Tensor) -> None:
    for tensor in tensors:
        wide = tensor.dtype == torch.float64
        require(not wide, "take fp32, bf16 or fp16 for Triton, or the naive path for fp64", tensor.dtype)
