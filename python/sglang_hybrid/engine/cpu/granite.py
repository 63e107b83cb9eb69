"""Granite-4 hybrid in SGLang 0.5.17 to 0.5.21: the last residual is added twice, on every device.

A decoder layer returns (hidden, residual) with the residual already in `hidden`, and the model's final norm adds it
once more. SGLang 0.5.22 rewrote both. The hook hands on a residual of zeros, which is what the final norm should have
got.
"""

from __future__ import annotations

import torch
from torch import Tensor


def drop_added_residual(result: tuple[Tensor, Tensor], *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """AFTER hook of a decoder layer: (hidden, residual) -> (hidden, zeros)."""
    hidden, _ = result
    return hidden, torch.zeros_like(hidden)
