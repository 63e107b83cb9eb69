"""The specification of state_verify and promote_path: one candidate after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_hybrid_kernels.state_verify.check import COMMITTED, NOTHING, Promotion, Tree, WindowPromotion


def state_verify(tree: Tree) -> tuple[Tensor, Tensor]:
    """See sglang_hybrid_kernels.state_verify; computes in fp32, or in fp64 if the pool or v is."""
    wide = _wide(tree.pool, tree.v)
    heads = tree.pool.shape[1]
    out, values = torch.zeros_like(tree.v), torch.zeros_like(tree.v, dtype=wide)
    for request, slot in enumerate(tree.slots.tolist()):
        committed = tree.pool[slot].to(wide) if slot >= 0 else torch.zeros_like(tree.pool[0], dtype=wide)
        states = {COMMITTED: committed}
        for node, parent in enumerate(tree.parent[request].tolist()):
            if parent == NOTHING:
                continue
            q, k = (_heads(x[request, node].to(wide), heads) for x in (tree.q, tree.k))
            value = tree.v[request, node].to(wide)
            state = states[parent] * tree.g[request, node].to(wide).exp()[:, None, None]
            if tree.beta is not None:
                value = tree.beta[request, node].to(wide)[:, None] * (value - torch.einsum("hvk,hk->hv", state, k))
            states[node] = state + value[:, :, None] * k[:, None, :]
            values[request, node] = value
            out[request, node] = (tree.scale * torch.einsum("hvk,hk->hv", states[node], q)).to(out.dtype)
    return out, values


def promote_path(promotion: Promotion) -> None:
    """See sglang_hybrid_kernels.state_verify.promote_path: the values of the path, replayed in order."""
    pool = promotion.pool
    wide = _wide(pool, promotion.values)
    for request, destination in enumerate(promotion.destination.tolist()):
        if destination < 0:
            continue
        slot = int(promotion.source[request])
        state = pool[:, slot].to(wide) if slot >= 0 else torch.zeros_like(pool[:, 0], dtype=wide)
        for node in path(promotion.parent[request].tolist(), int(promotion.accepted[request])):
            k = _heads(promotion.k[:, request, node].to(wide), pool.shape[2])
            value = promotion.values[:, request, node].to(wide)
            decay = promotion.g[:, request, node].to(wide).exp()
            state = state * decay[..., None, None] + value[..., :, None] * k[..., None, :]
        pool[:, destination] = state.to(pool.dtype)


def promote_window(promotion: WindowPromotion) -> None:
    """See sglang_hybrid_kernels.state_verify.promote_window: the old window, the path's inputs behind it, the last."""
    pool, width = promotion.pool, promotion.pool.shape[3]
    for request, destination in enumerate(promotion.destination.tolist()):
        if destination < 0:
            continue
        slot = int(promotion.source[request])
        window = pool[:, slot] if slot >= 0 else torch.zeros_like(pool[:, 0])
        nodes = path(promotion.parent[request].tolist(), int(promotion.accepted[request]))
        behind = promotion.inputs[:, request, nodes].transpose(1, 2)
        pool[:, destination] = torch.cat([window, behind], 2)[:, :, len(nodes) : len(nodes) + width]


def path(parent: list[int], node: int) -> list[int]:
    """The nodes from the committed state's child down to `node`."""
    found = []
    while node >= 0:
        found.append(node)
        node = parent[node]
    return found[::-1]


def _heads(x: Tensor, heads: int) -> Tensor:
    """[..., key_heads, K] -> [..., heads, K]."""
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _wide(a: Tensor, b: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
