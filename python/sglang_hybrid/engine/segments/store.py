"""The tensors of entries: every layer's share of a block or slot, as views of one range of bytes.

    block   [layer 0: rows | S_C | window] [layer 1: ...] ...  the states of one entry
    block   [token: K, V of layer 3; K, V of layer 7; ...] ... KV of some entries' interiors, a token after the other,
                                                               that of a head that drafts behind the model's
    block   [T of a head] [T of a head] ...                    transitions of some entries, of any layer and head

T is the transition over the interior, S_C its state from a zero start, window the last inputs of its convolution. Each
head has in `rows` the slot of its T, -1 where T has vanished. Where T is a number (Mamba-2), it stands in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sglang_hybrid.engine.segments import room
from sglang_hybrid.segment.slabs import Numbering

_ALIGNED = 16
"""Bytes at which every field begins: what a vector load wants."""

Field = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and type of what an entry keeps."""

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a rank keeps of each layer. `temporal`: [heads, V, K] of a recurrent state; `window`: [channels, tokens].

    `dense`: the transition is a matrix [K, K] per head (delta rule), otherwise a number (Mamba-2). `value_size` is 0
    where the values are a part of the keys (latent attention). `head_layers` are the attention layers of the model's
    own head, where it drafts.
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
    head_layers: int = 0


@dataclass(frozen=True, slots=True)
class Planes:
    """KV of attention layers: of each its `keys` [slots, heads, size], and `values` unless they are a part of them."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer's share of every block: first dimension blocks, then as `compose` of the kernels has it.

    With `transition_rows` [blocks, heads], `transition` [rows, K, K] is shared by all layers, like its scale.
    """

    transition: Tensor
    end_state: Tensor
    window: Tensor
    transition_rows: Tensor | None = None
    transition_scale: Tensor | None = None
    end_state_scale: Tensor | None = None

    def heads(self, some: slice) -> Layer:
        """Of some heads alone; what layers share, with the scale, is as it was."""
        rows, scale = self.transition_rows, self.end_state_scale
        return replace(
            self,
            transition=self.transition[:, some] if rows is None else self.transition,
            end_state=self.end_state[:, some],
            transition_rows=None if rows is None else rows[:, some],
            end_state_scale=None if scale is None else scale[:, some],
        )


class Store:
    """Blocks in `total_bytes` on `device`; states are stored as `dtype`, a name in `STORED`.

    `open_room` finds their memory by what an entry needs; a buffer if left out.
    """

    def __init__(
        self,
        shapes: Shapes,
        dtype: str,
        total_bytes: int,
        device: torch.device,
        open_room: Callable[[room.Needs], room.Room] | None = None,
    ) -> None:
        self.shapes = shapes
        stored = STORED[dtype]
        fields = _fields(shapes, stored)
        layer_bytes = sum(_padded(size, kind) for _, size, kind in fields)
        self.state_bytes = shapes.linear_layers * layer_bytes
        itemsize = shapes.kv_dtype.itemsize
        row_bytes = shapes.kv_heads * (shapes.key_size + shapes.value_size) * itemsize
        kv_bytes = (shapes.attention_layers + shapes.head_layers) * row_bytes
        self.token_bytes = _up(max(kv_bytes, 1))
        of_transition = _transition(shapes, stored)
        self.transition_bytes = sum(_padded(size, kind) for _, size, kind in of_transition)
        self.transitions = shapes.linear_layers * shapes.temporal[0] if shapes.dense else 0
        needs = room.Needs(self.state_bytes, self.token_bytes, self.transitions, self.transition_bytes)
        opened = (open_room or partial(room.fixed, total_bytes, device))(needs)
        self.blocks, self.buffer, self.block_bytes = opened.blocks, opened.data, opened.block_bytes
        self.block_tokens = self.blocks.kv.cut.slots
        shared, start = dict[str, Tensor](), 0
        for name, size, kind in of_transition:
            numbering = self.blocks.transitions.numbering
            shared[name] = self._slots(numbering, self.transition_bytes, start, size, kind)
            start += _padded(size, kind)
        self.layers = [Layer(**shared, **self._layer(fields, n * layer_bytes)) for n in range(shapes.linear_layers)]
        # The same memory as bytes: [blocks, state_bytes], and by slot [slots, bytes of one].
        strides = (self.block_bytes, 1)
        self.state_data = self.buffer.as_strided((self.blocks.count, self.state_bytes), strides)
        self.token_data = self._slot_data(self.blocks.kv.numbering, self.token_bytes)
        self.transition_data = self._slot_data(self.blocks.transitions.numbering, self.transition_bytes)
        self.kv = self._planes(range(shapes.attention_layers))
        self.head_kv = self._planes(range(shapes.attention_layers, shapes.attention_layers + shapes.head_layers))

    @property
    def total_bytes(self) -> int:
        """Bytes for which there are addresses; whether memory, is known to the blocks."""
        return self.blocks.count * self.block_bytes

    def _layer(self, fields: list[Field], start: int) -> dict[str, Tensor]:
        views = {}
        for name, size, kind in fields:
            shape = (self.blocks.count, *size)
            strides = (self.block_bytes // kind.itemsize, *_strides(size))
            views[name] = self.buffer.view(kind).as_strided(shape, strides, start // kind.itemsize)
            start += _padded(size, kind)
        return views

    def _planes(self, layers: range) -> Planes:
        shapes, row = self.shapes, self.shapes.kv_heads * self.shapes.kv_dtype.itemsize
        starts = [n * row * (shapes.key_size + shapes.value_size) for n in layers]
        behind = [start + row * shapes.key_size for start in starts if shapes.value_size]
        return Planes(
            [self._tokens(start, shapes.key_size) for start in starts],
            [self._tokens(start, shapes.value_size) for start in behind],
        )

    def _tokens(self, start: int, size: int) -> Tensor:
        heads, kind = self.shapes.kv_heads, self.shapes.kv_dtype
        return self._slots(self.blocks.kv.numbering, self.token_bytes, start, (heads, size), kind)

    def _slot_data(self, numbering: Numbering, size: int) -> Tensor:
        return self._slots(numbering, size or 1, 0, (size,), torch.uint8)

    def _slots(
        self, numbering: Numbering, slot_bytes: int, start: int, size: tuple[int, ...], kind: torch.dtype
    ) -> Tensor:
        """What lies `start` bytes behind the beginning of every slot, by its number."""
        shape = (self.blocks.count * numbering.span - numbering.step + 1, *size)
        strides = (slot_bytes // numbering.step // kind.itemsize, *_strides(size))
        return self.buffer.view(kind).as_strided(shape, strides, start // kind.itemsize)


def _fields(shapes: Shapes, dtype: torch.dtype) -> list[Field]:
    heads, value, key = shapes.temporal
    number: Field = ("transition_rows", (heads,), torch.int64)
    if not shapes.dense:
        number = ("transition", (heads,), torch.float32)
    kinds = [number, ("end_state", (heads, value, key), dtype), ("window", shapes.window, shapes.window_dtype)]
    return [*kinds, *_scale("end_state_scale", (heads, key), dtype)]


def _transition(shapes: Shapes, dtype: torch.dtype) -> list[Field]:
    """Of a head whose T is a matrix."""
    key = shapes.temporal[2]
    return [("transition", (key, key), dtype), *_scale("transition_scale", (key,), dtype)] if shapes.dense else []


def _scale(name: str, size: tuple[int, ...], dtype: torch.dtype) -> list[Field]:
    return [(name, size, torch.float32)] if dtype is torch.int8 else []


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(size[n + 1 :]) for n in range(len(size)))


def _padded(size: tuple[int, ...], kind: torch.dtype) -> int:
    return _up(math.prod(size) * kind.itemsize)


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
