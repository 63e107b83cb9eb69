"""Attention of queries at any positions of a text over its paged keys, masked by position."""

from __future__ import annotations

from torch import Tensor

from sglang_hybrid_kernels.dispatch import backend_for
from sglang_hybrid_kernels.seam_attention import naive
from sglang_hybrid_kernels.seam_attention.check import Plan


def seam_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    page_offsets: Tensor,
    positions: Tensor,
    query_offsets: Tensor,
    *,
    scale: float | None = None,
    page_size: int = 1,
    window: int | None = None,
    longest: int | None = None,
    check_slots: bool = True,
) -> Tensor:
    """[tokens, heads, Dv] in q's dtype: every query over the keys at positions up to its own, out of the pool.

    A request is one row, however many seams it has: its queries are the tokens that are run, each with its position in
    the text; its keys, theirs included, are in the pool before the call. So 64 seams read the text once for each block
    of queries and not 64 times.

    q              [tokens, heads, D] fp32, bf16 or fp16 (fp64 naive only).
    k, v           [slots, kv_heads, D] and [slots, kv_heads, Dv] of q's dtype; query head i reads head
                   i // (heads / kv_heads).
    pages          [n] pages of page_size slots, in the order of the text; with page_size 1 they are the slots.
    page_offsets   [requests + 1] request r owns pages[page_offsets[r] : page_offsets[r + 1]].
    positions      [tokens] of each query in its text, below the number of its request's slots; -1 gives zeros. In any
                   order; ascending is fastest, for tiles that no query of a block sees are left out.
    query_offsets  [requests + 1] request r owns queries query_offsets[r] to query_offsets[r + 1].
    scale          of q k^T; default D ** -0.5.
    window         how many keys a query sees, its own the last; None for all (sliding-window layers).
    longest        upper bound for the slots of one request; without it all of `pages`, at the price of idle programs.

    Keys are taken in parts of a fixed size, whose sums are joined in order: a query's bits depend on its own keys only,
    not on the batch, on other seams, or on where a prefix was cut. check_slots=False leaves out the checks that read
    index tensors, which on a GPU wait for the device; their values are then trusted. Raises ValueError.
    Source: HYPIC, attention of seam tokens at their positions.
    """
    plan = Plan(q, k, v, pages, page_offsets, positions, query_offsets, scale, page_size, window, longest)
    plan.check(check_slots)
    if backend_for(q) == "triton":
        from sglang_hybrid_kernels.seam_attention import triton

        return triton.seam_attention(plan)
    return naive.seam_attention(plan)


__all__ = ["seam_attention"]
