"""What chunk_h_jump accepts, and what it is then called with."""

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
    require_shape,
    require_slots,
)
from sglang_hybrid_kernels.compose.check import STATE_TYPES, Operators, require_entries, require_matrices

TOKEN_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CHUNK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Plan:
    """The arguments of one call."""

    k: Tensor
    w: Tensor | None
    u: Tensor
    g: Tensor
    state: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    request_rows: Tensor
    jump: Tensor
    operators: Operators
    chunk_size: int

    @property
    def per_channel(self) -> bool:
        return self.g.dim() == 3

    def check(self, check_slots: bool) -> int:
        """The number of chunks of h. Raises ValueError for anything chunk_h_jump cannot do."""
        require_shape("state", self.state, [None] * 4)
        slots, heads, v, k = self.state.shape
        require_shape("u", self.u, [None, heads, v])
        tokens, rows, requests = self.u.shape[0], self.jump.numel(), self.slots.numel()
        require_shape("k", self.k, [tokens, heads if self.per_channel else None, k])
        require(self.k.shape[1] > 0 and heads % self.k.shape[1] == 0, f"key heads must divide {heads}", self.k.shape[1])
        require_shape("g", self.g, [tokens, heads, k] if self.per_channel else [tokens, heads])
        require_dtype("state", self.state, (*STATE_TYPES, torch.float16))
        require_matrices("state", self.state, 2)
        by_token = {"k": self.k, "u": self.u, "g": self.g, **({} if self.w is None else {"w": self.w})}
        for name, tensor in by_token.items():
            require_dtype(name, tensor, TOKEN_TYPES)
        if self.w is not None:
            require_shape("w", self.w, [tokens, heads, k])
            require(self.w.dtype == self.k.dtype, "w must have the dtype of k", self.w.dtype)
        entries = self.operators.check((), heads, v, k)
        require_shape("slots", self.slots, [None])
        require_shape("jump", self.jump, [None])
        require_shape("cu_seqlens", self.cu_seqlens, [rows + 1])
        require_shape("request_rows", self.request_rows, [requests + 1])
        indices = {name: getattr(self, name) for name in ("slots", "cu_seqlens", "request_rows", "jump")}
        for name, index in indices.items():
            require_dtype(name, index, INTEGERS)
        require_device({"state": self.state, **by_token, **indices, **self.operators.tensors()})
        require(self.chunk_size in CHUNK_SIZES, f"chunk_size must be one of {CHUNK_SIZES}", self.chunk_size)
        if not check_slots:
            return tokens // self.chunk_size + rows
        require_slots("slots", self.slots, slots)
        used = self.slots[self.slots >= 0].tolist()
        require(len(set(used)) == len(used), "give each request a slot of its own", used)
        require_entries("jump", self.jump, entries, least=-1)
        self.operators.check_rows(self.jump[self.jump >= 0])
        require_cu_seqlens(self.request_rows, rows)
        require_cu_seqlens(self.cu_seqlens, tokens)
        return int(self.chunk_counts().sum())

    def chunk_counts(self) -> Tensor:
        """Chunks of each row, on the rows' device."""
        return (self.cu_seqlens.diff() + self.chunk_size - 1) // self.chunk_size
