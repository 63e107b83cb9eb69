"""What copy_slots accepts, and which pools take which path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_hybrid_kernels.arguments import (
    INTEGERS,
    require,
    require_device,
    require_dtype,
    require_shape,
    require_slots,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Plain(NamedTuple):
    """A pool copied as it is, or with a change of floating dtype."""

    pool: Tensor
    into: Tensor


class Quantised(NamedTuple):
    """A pool copied between floating point and int8 with scales; exactly one of scale and into_scale is None."""

    pool: Tensor
    into: Tensor
    scale: Tensor | None
    into_scale: Tensor | None


def split(
    pools: Sequence[Tensor],
    into: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    into_scales: Sequence[Tensor | None],
) -> tuple[list[Plain], list[Quantised]]:
    """Scales copied beside their int8 values are one more plain pool."""
    plain: list[Plain] = []
    quantised: list[Quantised] = []
    for pool, target, scale, into_scale in zip(pools, into, scales, into_scales, strict=True):
        if scale is None and into_scale is None:
            plain.append(Plain(pool, target))
        elif scale is not None and into_scale is not None:
            plain += [Plain(pool, target), Plain(scale, into_scale)]
        else:
            quantised.append(Quantised(pool, target, scale, into_scale))
    return plain, quantised


def arguments(
    pools: Sequence[Tensor],
    source: Tensor,
    destination: Tensor,
    into: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    into_scales: Sequence[Tensor | None],
    slot_dim: int,
    check_slots: bool,
) -> None:
    """Raise ValueError for anything copy_slots cannot do."""
    require(slot_dim in (0, 1), "slot_dim must be 0 for [slots, ...] or 1 for [layers, slots, ...]", slot_dim)
    lengths = {"pools": len(pools), "into": len(into), "scales": len(scales), "into_scales": len(into_scales)}
    require(len(set(lengths.values())) == 1, "give as many destinations and scales as pools", lengths)
    for name, slots in (("source", source), ("destination", destination)):
        require_shape(name, slots, [None])
        require_dtype(name, slots, INTEGERS)
    require(
        source.numel() == destination.numel(),
        "source and destination must be equally long",
        [source.numel(), destination.numel()],
    )
    tensors = {
        f"{name}[{i}]": tensor for name, some in (("pools", pools), ("into", into)) for i, tensor in enumerate(some)
    }
    require_device(tensors | {"source": source, "destination": destination})
    for i, (pool, target) in enumerate(zip(pools, into, strict=True)):
        _pair(i, pool, target, scales[i], into_scales[i], slot_dim)
    if check_slots and pools:
        require_slots("source", source, min(pool.shape[slot_dim] for pool in pools))
        require_slots("destination", destination, min(target.shape[slot_dim] for target in into))


def _layout(x: Tensor) -> tuple[object, ...]:
    return x.dtype, x.shape, x.stride()


def _pair(i: int, pool: Tensor, target: Tensor, scale: Tensor | None, into_scale: Tensor | None, slot_dim: int) -> None:
    require(pool.dim() > slot_dim, f"pools[{i}] must have a slot dimension, number {slot_dim}", list(pool.shape))
    require(pool.dtype.itemsize <= 8, f"pools[{i}] must have elements of at most 8 bytes", pool.dtype)
    row, into_row = (list(x.shape[:slot_dim] + x.shape[slot_dim + 1 :]) for x in (pool, target))
    require(row == into_row, f"into[{i}] must have the shape of pools[{i}] but for the slots", [row, into_row])
    require(
        target.data_ptr() != pool.data_ptr() or not target.numel() or _layout(target) == _layout(pool),
        f"into[{i}] must be pools[{i}] itself or share no memory with it",
        hex(pool.data_ptr()),
    )
    for name, values, its_scale in ((f"pools[{i}]", pool, scale), (f"into[{i}]", target, into_scale)):
        if its_scale is not None:
            require(values.dtype == torch.int8, f"only int8 pools have scales; drop those of {name}", values.dtype)
            fits = slot_dim + 3 <= values.dim() <= slot_dim + 4
            require(fits, f"a slot of {name} must be [V, K] or [heads, V, K] to be scaled", list(values.shape))
            require_shape(f"the scale of {name}", its_scale, [*values.shape[:-2], 1, values.shape[-1]])
            require_dtype(f"the scale of {name}", its_scale, FLOATS)
            require_device({name: values, f"the scale of {name}": its_scale})
    both = {pool.dtype, target.dtype}
    if both == {torch.int8} or len(both) == 1:
        require(
            (scale is None) == (into_scale is None),
            f"pools[{i}] and into[{i}] are both int8: give both scales or none",
            [scale is not None, into_scale is not None],
        )
        if scale is not None and into_scale is not None:
            require(scale.dtype == into_scale.dtype, f"the scales of pool {i} must have one dtype", into_scale.dtype)
    elif torch.int8 in both:
        require_dtype(f"pools[{i}]", pool, (*FLOATS, torch.int8))
        require_dtype(f"into[{i}]", target, (*FLOATS, torch.int8))
        needed = into_scale if target.dtype == torch.int8 else scale
        name = "into_scales" if target.dtype == torch.int8 else "scales"
        require(needed is not None, f"give {name}[{i}]: conversion with int8 needs scales", [pool.dtype, target.dtype])
    else:
        require_dtype(f"pools[{i}]", pool, FLOATS)
        require_dtype(f"into[{i}]", target, FLOATS)
