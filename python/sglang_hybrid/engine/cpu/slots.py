"""Reads and writes of state pools [slots, ...] that skip padding: a negative slot reads zeros and is never written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LARGE = 1 << 18
"""Elements of a state from which on decoding works row by row inside the pool: copying costs more than launching."""


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


def advance_rows(pool: Tensor, slots: list[int], step: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """What `step` gives for the states [rows, ...] of `slots`, which it changes in place, and `inputs` [rows, ...]."""
    rows = len(inputs[0])
    if (rows == 1 or pool[0].numel() >= _LARGE) and min(slots) >= 0 and pool.dtype == torch.float32:
        found = [step(pool[slot : slot + 1], *(x[row : row + 1] for x in inputs)) for row, slot in enumerate(slots)]
        return found[0] if rows == 1 else torch.cat(found)
    states = read(pool, slots)
    output = step(states, *inputs)
    write(pool, slots, states)
    return output
