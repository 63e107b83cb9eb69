"""Segment entries of the cases of compose and chunk_h_jump: their types, and transitions in a pool of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STORED = (torch.float32, torch.bfloat16, torch.int8)
KEPT = 4
"""One head in so many has a transition where transitions are in a pool of rows; those of the others are zero."""


def as_stored(name: str, values: Tensor, kind: torch.dtype) -> dict[str, Tensor]:
    """The arguments for matrices [..., K, K] kept as `kind`: with a scale for each column if they have eight bits."""
    if kind is not torch.int8:
        return {name: values.to(kind)}
    step = values.abs().amax(-2, keepdim=True) / 127
    return {name: (values / step).round().to(torch.int8), f"{name}_scale": step.squeeze(-2)}


def rows_of(*cells: int, device: torch.device) -> tuple[Tensor, int]:
    """transition_rows [..., entries, heads], the last head that has one in row 0; and the number of rows."""
    kept = (torch.arange(cells[-1], device=device) % KEPT == 0).expand(cells)
    count = int(kept.sum())
    rows = torch.full(cells, -1, dtype=torch.int64, device=device)
    rows[kept] = torch.arange(count - 1, -1, -1, device=device)
    return rows, count


def transition_of(transition: Tensor, rows: Tensor | None, *at: Any) -> Tensor:
    """The dense matrices at this index of [..., entries, heads], in a copy where they are in a pool of rows."""
    if rows is None:
        return transition[at]
    rows = rows[at]
    return transition[rows.clamp(min=0)] * (rows >= 0)[..., None, None].to(transition.dtype)
