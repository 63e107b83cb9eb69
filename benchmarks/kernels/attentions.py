"""Other people's attention over paged keys, with the mask of a request that is assembled from segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 256 << 20


def seen(pages: Tensor, positions: Tensor) -> Tensor:
    """bool [queries, keys] of a single request whose pages are slots: a query sees the keys up to its position."""
    return torch.arange(pages.numel(), device=pages.device) <= positions[:, None]


def masked(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """PyTorch: keys gathered, one call with a mask of queries times keys."""
    mask = seen(pages, positions)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k[pages], v[pages]))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def sglang_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    positions: Tensor,
    query_offsets: Tensor,
    page_offsets: Tensor,
    **_: Any,
) -> Callable[[], Tensor]:
    """SGLang's extend attention in one stage, over the pool, with a mask."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

    out, mask = torch.empty_like(q), seen(pages, positions).flatten().to(torch.uint8)
    places = [x.int() for x in (query_offsets, page_offsets)]
    prefix = page_offsets.diff().int() - query_offsets.diff().int()
    starts = torch.zeros(2, dtype=torch.int64, device=q.device)

    def call() -> Tensor:
        extend_attention_fwd_unified(
            q, out, k, v, 1.0, 1.0, *places, pages, prefix, q.shape[0], custom_mask=mask, mask_indptr=starts,
            is_causal=False,
        )  # fmt: skip
        return out

    return call


def flashinfer_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    positions: Tensor,
    query_offsets: Tensor,
    page_offsets: Tensor,
    **_: Any,
) -> Callable[[], Tensor]:
    """FlashInfer's paged prefill with a mask. Its plan is made once for all layers, and not timed."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    last = torch.ones(page_offsets.numel() - 1, dtype=torch.int32, device=q.device)
    wrapper.plan(
        query_offsets.int(), page_offsets.int(), pages.int(), last, q.shape[1], k.shape[1], q.shape[2], 1,
        custom_mask=seen(pages, positions).flatten(), q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    pool = (k.unsqueeze(1), v.unsqueeze(1))
    return lambda: wrapper.run(q, pool)
