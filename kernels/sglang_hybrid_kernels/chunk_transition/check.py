"""What chunk_transition accepts, and what it is then called with."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    require_slots,
)
from sglang_hybrid_kernels.chunk import precision

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LARGEST_K = {"scalar": 256, "diagonal": 128}
"""By decay: with one per channel, larger keys do not fit into a GPU's shared memory."""


@dataclass(frozen=True)
class Plan:
    """The arguments of one call, see `chunk_transition`."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    cu_seqlens: Tensor
    entries: Tensor
    end_state: Tensor
    transition: Tensor | None
    vanishing: Tensor | None
    vanishing_below: float
    initial: Tensor | None
    initial_slots: Tensor | None
    delta: bool
    l2norm: bool

    @property
    def diagonal(self) -> bool:
        """Whether each key channel decays on its own."""
        return self.g.dim() == 3

    def widened(self) -> Plan:
        """The same with floating buffers in place of int8 storage, which is then made from them."""
        dtype = precision(self.k, self.v, self.g, self.beta)
        wide = {
            name: torch.empty_like(stored, dtype=dtype)
            for name, stored in (("end_state", self.end_state), ("transition", self.transition))
            if stored is not None and stored.dtype == torch.int8
        }
        return replace(self, **wide) if wide else self

    def check(self, scales: dict[str, Tensor | None], values: bool) -> None:
        """Raises ValueError; reads what lies on the device only if `values`."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        require_device(tensors | {f"{name}_scale": x for name, x in scales.items() if x is not None})
        self._check_tokens()
        self._check_outputs(scales)
        given = [self.initial is not None, self.initial_slots is not None]
        require(given[0] == given[1], "give initial and initial_slots together", given)
        for name in ("cu_seqlens", "entries", "initial_slots"):
            if name in tensors:
                require_dtype(name, tensors[name], INTEGERS)
        segments = self.cu_seqlens.numel() - 1
        require_shape("entries", self.entries, [segments])
        if self.initial is not None and self.initial_slots is not None:
            require_shape("initial", self.initial, [None, *self.end_state.shape[1:]])
            require_dtype("initial", self.initial, FLOATS)
            require_last_contiguous("initial", self.initial)
            require_shape("initial_slots", self.initial_slots, [segments])
            other = self.initial.data_ptr() != self.end_state.data_ptr()
            require(other, "initial must not be end_state: copy the state first", hex(self.initial.data_ptr()))
        if values:
            require_cu_seqlens(self.cu_seqlens, self.k.shape[0])
            require_slots("entries", self.entries, self.end_state.shape[0])
            written = [entry for entry in self.entries.tolist() if entry >= 0]
            require(len(set(written)) == len(written), "name each entry once", written)
            if self.initial is not None and self.initial_slots is not None:
                require_slots("initial_slots", self.initial_slots, self.initial.shape[0])

    def _check_tokens(self) -> None:
        require_shape("k", self.k, [None, None, None])
        tokens, key_heads, dk = self.k.shape
        require_shape("v", self.v, [tokens, None, None])
        heads = self.v.shape[1]
        require(key_heads > 0 and heads % key_heads == 0, f"k's heads must divide v's {heads} heads", key_heads)
        largest = LARGEST_K["diagonal" if self.diagonal else "scalar"]
        require(dk <= largest, f"use a key size of at most {largest} with this decay", dk)
        require_shape("g", self.g, [tokens, heads, dk] if self.g.dim() == 3 else [tokens, heads])
        if self.beta is not None:
            require_shape("beta", self.beta, [tokens, heads])
        for name in ("k", "v", "g", "beta"):
            tensor = getattr(self, name)
            if tensor is not None:
                require_dtype(name, tensor, FLOATS)
                if tensor.dim() == 3:
                    require_last_contiguous(name, tensor)

    def _check_outputs(self, scales: dict[str, Tensor | None]) -> None:
        heads, dv, dk = *self.v.shape[1:], self.k.shape[2]
        require_shape("end_state", self.end_state, [None, heads, dv, dk])
        count = self.end_state.shape[0]
        tail = [dk, dk] if self.delta else [dk] if self.diagonal else []
        if self.transition is not None:
            require_shape("transition", self.transition, [count, heads, *tail])
        for name, stored in (("end_state", self.end_state), ("transition", self.transition)):
            scale = scales[name]
            eight_bits = stored is not None and stored.dtype == torch.int8
            require(eight_bits == (scale is not None), f"give {name}_scale exactly when {name} is int8", eight_bits)
            if stored is not None:
                require_dtype(name, stored, (*FLOATS, torch.int8) if stored.dim() == 4 else FLOATS)
                if stored.dim() > 2:
                    require_last_contiguous(name, stored)
            if scale is not None:
                require_shape(f"{name}_scale", scale, [count, heads, dk])
                require_dtype(f"{name}_scale", scale, FLOATS)
        if self.vanishing is not None:
            require(self.transition is not None, "ask for transition to learn which vanish", self.transition)
            require_shape("vanishing", self.vanishing, [count, heads])
            require_dtype("vanishing", self.vanishing, (torch.bool,))
        require(self.vanishing_below >= 0, "vanishing_below must not be negative", self.vanishing_below)
