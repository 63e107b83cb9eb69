"""The tensors of entries: every layer's share of a block or slot, as views of one range of bytes.

    block   [layer 0: T | S_C | window] [layer 1: ...] ...     the states of one entry
    block   [token: K, V of layer 3; K, V of layer 7; ...] ... KV of some entries' interiors, a token after the other

T is the transition over the interior, S_C its state from a zero start, window the last inputs of its convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sglang_hybrid.engine.segments import room

_ALIGNED = 16
"""Bytes at which every field begins: what a vector load wants."""

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a rank keeps of each layer. `temporal`: [heads, V, K] of a recurrent state; `window`: [channels, tokens].

    `dense`: the transition is a matrix [K, K] per head (delta rule), otherwise a number (Mamba-2).
    """

    linear_layers: int
    temporal: tuple[int, int, int]
    window: tuple[int, int]
    window_dtype: torch.dtype
    dense: bool
    attention_layers: int
    kv_heads: int
    key_size: int
    value_size: int
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer's share of every block: first dimension blocks, then as `compose` of the kernels has it."""

    transition: Tensor
    end_state: Tensor
    window: Tensor
    vanishing: Tensor
    transition_scale: Tensor | None = None
    end_state_scale: Tensor | None = None

    def leave_alone(self, blocks: Tensor) -> None:
        """Let the segments in `blocks` leave states before them as they are: T is the identity."""
        whole = 127 if self.transition.dtype is torch.int8 else 1
        kept: Tensor | int = whole
        if self.transition.dim() == 4:
            size = self.transition.shape[-1]
            kept = whole * torch.eye(size, dtype=self.transition.dtype, device=self.transition.device)
        self.transition[blocks] = kept
        self.vanishing[blocks] = False
        if self.transition_scale is not None:
            self.transition_scale[blocks] = 1 / whole


class Store:
    """Blocks in `total_bytes` on `device`; states are stored as `dtype`, a name in `STORED`.

    `open_room` finds their memory by the bytes of one entry's states and of one token's KV; a buffer if left out.
    """

    def __init__(
        self,
        shapes: Shapes,
        dtype: str,
        total_bytes: int,
        device: torch.device,
        open_room: Callable[[int, int], room.Room] | None = None,
    ) -> None:
        self.shapes = shapes
        fields = _fields(shapes, STORED[dtype])
        layer_bytes = sum(_padded(size, kind) for _, size, kind in fields)
        self.state_bytes = shapes.linear_layers * layer_bytes
        itemsize = shapes.kv_dtype.itemsize
        kv_bytes = shapes.attention_layers * shapes.kv_heads * (shapes.key_size + shapes.value_size) * itemsize
        self.token_bytes = _up(max(kv_bytes, 1))
        opened = (open_room or partial(room.fixed, total_bytes, device))(self.state_bytes, self.token_bytes)
        self.blocks, self.buffer, self.block_bytes = opened.blocks, opened.data, opened.block_bytes
        self.block_tokens = self.blocks.block_tokens
        self.layers = [self._layer(fields, n * layer_bytes) for n in range(shapes.linear_layers)]
        row = shapes.kv_heads * itemsize
        starts = [n * row * (shapes.key_size + shapes.value_size) for n in range(shapes.attention_layers)]
        self.keys = [self._tokens(start, shapes.key_size) for start in starts]
        self.values = [self._tokens(start + row * shapes.key_size, shapes.value_size) for start in starts]

    @property
    def total_bytes(self) -> int:
        """Bytes for which there are addresses; whether memory, is known to the blocks."""
        return self.blocks.count * self.block_bytes

    def _layer(self, fields: list[tuple[str, tuple[int, ...], torch.dtype]], start: int) -> Layer:
        views = {}
        for name, size, kind in fields:
            shape = (self.blocks.count, *size)
            strides = (self.block_bytes // kind.itemsize, *_strides(size))
            views[name] = self.buffer.view(kind).as_strided(shape, strides, start // kind.itemsize)
            start += _padded(size, kind)
        return Layer(**views)

    def _tokens(self, start: int, size: int) -> Tensor:
        heads, kind = self.shapes.kv_heads, self.shapes.kv_dtype
        numbering = self.blocks.numbering
        shape = (self.blocks.count * numbering.span - numbering.step + 1, heads, size)
        strides = (self.token_bytes // numbering.step // kind.itemsize, size, 1)
        return self.buffer.view(kind).as_strided(shape, strides, start // kind.itemsize)


def _fields(shapes: Shapes, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    heads, value, key = shapes.temporal
    transition = (heads, key, key) if shapes.dense else (heads,)
    kinds = [
        ("transition", transition, dtype if shapes.dense else torch.float32),
        ("end_state", (heads, value, key), dtype),
        ("window", shapes.window, shapes.window_dtype),
        ("vanishing", (heads,), torch.bool),
    ]
    if dtype is torch.int8:
        names = ("transition_scale", "end_state_scale") if shapes.dense else ("end_state_scale",)
        kinds += [(name, (heads, key), torch.float32) for name in names]
    return kinds


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(size[n + 1 :]) for n in range(len(size)))


def _padded(size: tuple[int, ...], kind: torch.dtype) -> int:
    return _up(math.prod(size) * kind.itemsize)


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
