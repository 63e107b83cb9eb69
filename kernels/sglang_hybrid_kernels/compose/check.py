"""What compose accepts, and what it is then called with."""

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

STATE_TYPES = (torch.float32, torch.bfloat16, torch.float64)
STORED_TYPES = (*STATE_TYPES, torch.int8)
SCALE_TYPES = (*STATE_TYPES, torch.float16)


@dataclass(frozen=True)
class Operators:
    """Segment entries as they are stored, see `compose`: transition and end state [*lead, entries, heads, ...], or
    transitions [rows, K, K] and where they are, transition_rows [*lead, entries, heads]."""

    transition: Tensor
    end_state: Tensor
    transition_scale: Tensor | None
    end_state_scale: Tensor | None
    transition_rows: Tensor | None

    @property
    def family(self) -> str:
        if self.transition_rows is not None:
            return "dense"
        return ("dense", "diagonal", "scalar")[self.end_state.dim() - self.transition.dim()]

    def check(self, lead: tuple[int, ...], heads: int, v: int, k: int) -> int:
        """The number of entries. Raises ValueError."""
        front = (*lead, None, heads)
        require_shape("end_state", self.end_state, (*front, v, k))
        entries = self.end_state.shape[len(lead)]
        front = (*lead, entries, heads)
        self._check_stored("end_state", self.end_state, self.end_state_scale, front, k)
        shape = list(self.transition.shape)
        if self.transition_rows is not None:
            remedy = f"give transition_rows with dense transitions only, in a pool [rows, {k}, {k}]"
            require(len(shape) == 3 and shape[1:] == [k, k], remedy, shape)
            require_shape("transition_rows", self.transition_rows, front)
            require_dtype("transition_rows", self.transition_rows, INTEGERS)
            front = (shape[0],)
        else:
            tails: tuple[tuple[int, ...], ...] = ((), (k,), (k, k))
            scalar, diagonal, dense = ([*front, *tail] for tail in tails)
            remedy = f"transition must have shape {scalar} (scalar), {diagonal} (diagonal) or {dense} (dense)"
            require(shape in (scalar, diagonal, dense), remedy, shape)
        self._check_stored("transition", self.transition, self.transition_scale, front, k)
        return entries

    def check_rows(self, used: Tensor) -> None:
        """Every row that these entries name is in the pool. Reads the values. Raises ValueError."""
        if self.transition_rows is not None and used.numel() and self.transition_rows.numel():
            rows, highest = self.transition.shape[0], int(self.transition_rows[..., used, :].max())
            remedy = f"transition_rows must name rows of transition, 0 to {rows - 1}, or be negative"
            require(highest < rows, remedy, highest)

    def _check_stored(self, name: str, tensor: Tensor, scale: Tensor | None, front: tuple[int, ...], k: int) -> None:
        require_dtype(name, tensor, STORED_TYPES)
        eight_bits = tensor.dtype == torch.int8
        require(eight_bits == (scale is not None), f"give {name}_scale exactly when {name} is int8", tensor.dtype)
        require_matrices(name, tensor, tensor.dim() - len(front))
        if scale is not None:
            require(tensor.dim() > len(front), f"store a scalar {name} in float", tensor.dtype)
            require_shape(f"{name}_scale", scale, (*front, k))
            require_dtype(f"{name}_scale", scale, SCALE_TYPES)
            require_matrices(f"{name}_scale", scale, 1)

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if x is not None}

    def in_order(self) -> tuple[Tensor | None, ...]:
        """The order of the kernels' arguments."""
        return self.transition, self.transition_scale, self.end_state, self.end_state_scale, self.transition_rows


@dataclass(frozen=True)
class Plan:
    """The arguments of one call."""

    pool: Tensor
    source: Tensor
    destination: Tensor
    chain: Tensor
    chain_offsets: Tensor
    operators: Operators
    tree_groups: int

    def check(self, check_slots: bool) -> None:
        """Raises ValueError for anything compose cannot do."""
        require_shape("pool", self.pool, [None] * 5)
        require_dtype("pool", self.pool, STATE_TYPES)
        require_matrices("pool", self.pool, 2)
        layers, slots, heads, v, k = self.pool.shape
        entries = self.operators.check((layers,), heads, v, k)
        rows = self.source.numel()
        require_shape("source", self.source, [None])
        require_shape("destination", self.destination, [rows])
        require_shape("chain", self.chain, [None])
        require_shape("chain_offsets", self.chain_offsets, [rows + 1])
        indices = {name: getattr(self, name) for name in ("source", "destination", "chain", "chain_offsets")}
        for name, index in indices.items():
            require_dtype(name, index, INTEGERS)
        require_device({"pool": self.pool, **indices, **self.operators.tensors()})
        groups = self.tree_groups
        require(
            groups == 1 or (groups > 1 and self.operators.family == "dense"),
            "set tree_groups to 1, or higher for dense transitions only",
            groups,
        )
        if check_slots:
            require_slots("source", self.source, slots)
            require_slots("destination", self.destination, slots)
            require_entries("chain", self.chain, entries, least=0)
            require_cu_seqlens(self.chain_offsets, self.chain.numel())
            self.operators.check_rows(self.chain)
            _require_no_race(self.source.tolist(), self.destination.tolist())


def require_matrices(name: str, tensor: Tensor, dims: int) -> None:
    """The last `dims` dimensions lie densely in memory."""
    dense = 1
    for size, stride in list(zip(tensor.shape, tensor.stride(), strict=True))[: -dims - 1 : -1]:
        require(stride == dense or size == 1, f"make the last {dims} dimensions of {name} contiguous", tensor.stride())
        dense *= size


def require_entries(name: str, entries: Tensor, count: int, least: int) -> None:
    """Every entry in [least, count). Reads the values."""
    if entries.numel():
        low, high = int(entries.min()), int(entries.max())
        value = low if low < least else high
        require(least <= value < count, f"{name} must name segment entries, {least} to {count - 1}", value)


def _require_no_race(source: list[int], destination: list[int]) -> None:
    written = [slot for slot in destination if slot >= 0]
    require(len(set(written)) == len(written), "write each destination slot from one row only", destination)
    row_of = {slot: row for row, slot in enumerate(destination)}
    for row, slot in enumerate(source):
        raced = slot >= 0 and destination[row] >= 0 and row_of.get(slot, row) != row
        require(not raced, "first copy a source that another row overwrites; its slot", slot)
