"""Attention of candidates: each sees the committed prefix and its own ancestors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def note_tree(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook of TorchNativeAttnBackend.forward_extend, which hands the tree on to no one."""
    backend, forward_batch = args[0], kwargs.get("forward_batch") or args[5]
    verifies = forward_batch.forward_mode.is_target_verify()
    backend.candidates = forward_batch.spec_info if verifies else None
    return args, kwargs


def verify(
    tree: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scaling: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Of `query` [requests * nodes, heads, head size] into output, behind committed prefixes of seq_lens [requests].

    `tree` is SGLang's input of a verification; keys and values of the candidates are in the cache already, in the
    columns of req_to_token behind the prefix.
    """
    nodes = tree.draft_token_num
    for request, (row, prefix) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, : prefix + nodes]
        key, value = (cache[slots].to(query.dtype).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        seen = torch.ones(nodes, prefix + nodes, dtype=torch.bool)
        if tree.tree_topk == 1:
            seen[:, prefix:].tril_()
        else:
            seen[:, prefix:] = tree.custom_mask[request * nodes**2 : (request + 1) * nodes**2].view(nodes, nodes)
        mine = slice(request * nodes, (request + 1) * nodes)
        rows = query[mine].transpose(0, 1)[None]
        found = scaled_dot_product_attention(rows, key, value, attn_mask=seen, scale=scaling, enable_gqa=enable_gqa)
        output[mine] = found[0].transpose(0, 1)
    return output
