"""The specification of copy_slots: a loop over pairs and pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_hybrid_kernels.copy_slots.check import Plain, Quantised

LARGEST = 127
LEAST_SCALE = 1e-8


def copy_slots(
    plain: Sequence[Plain], quantised: Sequence[Quantised], source: Tensor, destination: Tensor, slot_dim: int
) -> None:
    """See sglang_hybrid_kernels.copy_slots; pools as check.split returns them."""
    for read, write in zip(source.tolist(), destination.tolist(), strict=True):
        for pool, into in plain:
            if 0 <= read < pool.shape[slot_dim] and 0 <= write < into.shape[slot_dim]:
                into.select(slot_dim, write).copy_(pool.select(slot_dim, read))
        for pool, into, scale, into_scale in quantised:
            if not (0 <= read < pool.shape[slot_dim] and 0 <= write < into.shape[slot_dim]):
                continue
            row, target = pool.select(slot_dim, read), into.select(slot_dim, write)
            if scale is not None:
                target.copy_(row.to(_wide(target)) * scale.select(slot_dim, read).to(_wide(target)))
            elif into_scale is not None:
                target_scale = into_scale.select(slot_dim, write)
                target_scale.copy_(column_scale(row))
                target.copy_(quantise(row, target_scale))


def column_scale(row: Tensor) -> Tensor:
    """[..., V, K] -> [..., 1, K]: the value of one step of int8, for every column of V."""
    largest = _without_nan(row.to(_wide(row))).abs().amax(-2, keepdim=True).clamp_min(LEAST_SCALE)
    return largest / torch.full_like(largest, LARGEST)  # by a number, CUDA would multiply with its rounded reciprocal


def quantise(row: Tensor, scale: Tensor) -> Tensor:
    """[..., V, K] and scale [..., 1, K] -> int8, rounded half to even."""
    steps = row.to(_wide(row)) / scale.to(_wide(row))
    return _without_nan(steps).round().clamp(-LARGEST, LARGEST).to(torch.int8)


def _without_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0.0, x)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
