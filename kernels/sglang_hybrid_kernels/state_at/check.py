"""What state_at accepts, and what it is then called with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
    require_wanted,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LARGEST_K = 256
CHUNKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Plan:
    """The arguments of one call, see `state_at`."""

    h: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    cu_seqlens: Tensor
    sequence: Tensor
    position: Tensor
    into: Tensor
    slots: Tensor
    delta: bool
    l2norm: bool
    chunk: int

    @property
    def diagonal(self) -> bool:
        """Whether each key channel decays on its own."""
        return self.g.dim() == 3

    def check(self, values: bool) -> None:
        """Raises ValueError; reads what lies on the device only if `values`."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        require_device(tensors)
        require_shape("h", self.h, [None] * 4)
        chunks, heads, dv, dk = self.h.shape
        require_shape("k", self.k, [None, None, dk])
        tokens, key_heads, _ = self.k.shape
        require(key_heads > 0 and heads % key_heads == 0, f"k's heads must divide h's {heads} heads", key_heads)
        require(dk <= LARGEST_K, f"use a key size of at most {LARGEST_K}", dk)
        require(self.chunk in CHUNKS, f"chunk must be one of {CHUNKS}", self.chunk)
        require_shape("v", self.v, [tokens, heads, dv])
        require_shape("g", self.g, [tokens, heads, dk] if self.g.dim() == 3 else [tokens, heads])
        if self.beta is not None:
            require_shape("beta", self.beta, [tokens, heads])
        require_shape("into", self.into, [None, heads, dv, dk])
        for name in ("h", "k", "v", "g", "beta", "into"):
            if name in tensors:
                require_dtype(name, tensors[name], FLOATS)
        for name in ("h", "k", "v", "into") + ("g",) * self.diagonal:
            require_last_contiguous(name, tensors[name])
        require_shape("position", self.position, [None])
        for name in ("cu_seqlens", "sequence", "position", "slots"):
            require_dtype(name, tensors[name], INTEGERS)
            if name != "cu_seqlens":
                require_shape(name, tensors[name], [self.position.numel()])
        if values:
            self._check_values(chunks, tokens)

    def _check_values(self, chunks: int, tokens: int) -> None:
        bounds = require_cu_seqlens(self.cu_seqlens, tokens)
        lengths = [hi - lo for lo, hi in pairwise(bounds)]
        expected = sum(-(-length // self.chunk) for length in lengths)
        require(chunks == expected, f"h must have {expected} chunks of {self.chunk} tokens for these sequences", chunks)
        for sequence, *_ in require_wanted(self.sequence, self.position, self.slots, lengths, self.into.shape[0]):
            require(lengths[sequence] > 0, "the state of an empty sequence is its initial state; sequence", sequence)
