"""What seam_attention accepts, and what it is then called with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_hybrid_kernels.arguments import (
    INTEGERS,
    require,
    require_cu_seqlens,
    require_device,
    require_dtype,
    require_last_contiguous,
    require_shape,
)

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Plan:
    """The arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: Tensor
    page_offsets: Tensor
    positions: Tensor
    query_offsets: Tensor
    scale: float | None
    page_size: int
    window: int | None
    longest: int | None

    @property
    def factor(self) -> float:
        return self.q.shape[2] ** -0.5 if self.scale is None else self.scale

    @property
    def most_keys(self) -> int:
        """No request has more keys."""
        return self.pages.numel() * self.page_size if self.longest is None else self.longest

    def check(self, check_slots: bool) -> None:
        """Raises ValueError for anything seam_attention cannot do."""
        require_shape("q", self.q, [None] * 3)
        tokens, heads, size = self.q.shape
        require_shape("k", self.k, [None, None, size])
        slots, kv_heads, _ = self.k.shape
        require_shape("v", self.v, [slots, kv_heads, None])
        require(kv_heads > 0 and heads % kv_heads == 0, f"kv heads must divide {heads} query heads", kv_heads)
        require_dtype("q", self.q, TYPES)
        for name in ("k", "v"):
            require_dtype(name, getattr(self, name), (self.q.dtype,))
        require_shape("page_offsets", self.page_offsets, [None])
        requests = self.page_offsets.numel() - 1
        require_shape("pages", self.pages, [None])
        require_shape("positions", self.positions, [tokens])
        require_shape("query_offsets", self.query_offsets, [requests + 1])
        indices = {name: getattr(self, name) for name in ("pages", "page_offsets", "positions", "query_offsets")}
        for name, index in indices.items():
            require_dtype(name, index, INTEGERS)
        tensors = {"q": self.q, "k": self.k, "v": self.v}
        for name, tensor in tensors.items():
            require_last_contiguous(name, tensor)
        require_device({**tensors, **indices})
        size_fits = self.page_size > 0 and slots % self.page_size == 0
        require(size_fits, f"page_size must divide the pool's {slots} slots", self.page_size)
        require(self.window is None or self.window > 0, "window must be positive, or None", self.window)
        require(self.longest is None or self.longest >= 0, "longest must not be negative", self.longest)
        if check_slots:
            self._check_slots(slots // self.page_size)

    def _check_slots(self, pages: int) -> None:
        queries = torch.tensor(require_cu_seqlens(self.query_offsets, self.q.shape[0])).diff()
        keys = torch.tensor(require_cu_seqlens(self.page_offsets, self.pages.numel())).diff() * self.page_size
        if self.pages.numel():
            low, high = int(self.pages.min()), int(self.pages.max())
            require(low >= 0 and high < pages, f"pages must lie in 0..{pages - 1}", low if low < 0 else high)
        if keys.numel() and self.longest is not None:
            require(int(keys.max()) <= self.longest, "longest must bound every request's slots", int(keys.max()))
        positions, ends = self.positions.cpu(), keys.repeat_interleave(queries)
        wrong = (positions < -1) | (positions >= ends)
        require(not bool(wrong.any()), "positions must lie below their request's slots", positions[wrong].tolist()[:16])
