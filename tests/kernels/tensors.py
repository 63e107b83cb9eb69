"""Tensors of random numbers, and the bytes of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Drawn in float64, whatever the type."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def whole(tensor: Tensor) -> Tensor:
    """All bytes of the storage, also those outside the view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
