"""Allocation in pages of several tokens: SGLang's allocator launches Triton kernels whatever the device is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def alloc_extend(
    original: Any,
    allocator: Any,
    prefix_lens: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    last_loc: Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Tensor | None:
    """AROUND hook of PagedTokenToKVPoolAllocator.alloc_extend: slots [extend_num_tokens], None if there are too few."""
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    page = allocator.page_size
    pages = int(((seq_lens_cpu + page - 1) // page - (prefix_lens_cpu + page - 1) // page).sum())
    if not _reserve(allocator, pages):
        return None
    tokens = torch.empty(extend_num_tokens, dtype=torch.int64)
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, allocator.free_pages, tokens, page, "cpu")
    allocator.free_pages = allocator.free_pages[pages:]
    return tokens


def alloc_decode(
    original: Any, allocator: Any, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
) -> Tensor | None:
    """AROUND hook of PagedTokenToKVPoolAllocator.alloc_decode: one slot per row, None if there are too few."""
    page = allocator.page_size
    fresh = (seq_lens - 1) % page == 0  # the last page of these rows is full
    pages = int(fresh.sum())
    if not _reserve(allocator, pages):
        return None
    tokens = last_loc.to(torch.int64) + 1
    tokens[fresh] = allocator.free_pages[:pages].to(torch.int64) * page
    allocator.free_pages = allocator.free_pages[pages:]
    return tokens


def _reserve(allocator: Any, pages: int) -> bool:
    if pages > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    return pages <= len(allocator.free_pages)
