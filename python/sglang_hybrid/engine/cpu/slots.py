"""Reads and writes of state pools [slots, ...] that skip padding: a negative slot reads zeros and is never written."""

from __future__ import annotations

import torch
from torch import Tensor


def read(pool: Tensor, slots: list[int]) -> Tensor:
    """The states [len(slots), ...] in float32, as a copy."""
    index = torch.tensor(slots, dtype=torch.int64)
    if min(slots, default=0) >= 0:
        states = pool.index_select(0, index)
        return states if states.dtype == torch.float32 else states.float()
    states = pool.index_select(0, index.clamp(min=0)).float()
    states[index < 0] = 0.0
    return states


def write(pool: Tensor, slots: list[int], states: Tensor) -> None:
    """Store states [len(slots), ...] in their slots, rounded to the pool's dtype."""
    if min(slots, default=0) < 0:
        rows = [row for row, slot in enumerate(slots) if slot >= 0]
        slots, states = [slots[row] for row in rows], states[rows]
    if slots:
        pool[slots] = states.to(pool.dtype)
