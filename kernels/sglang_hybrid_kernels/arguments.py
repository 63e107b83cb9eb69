"""Checks that operations share. Each raises ValueError: what to do, then the value that was wrong.

They run before every launch, once a layer: messages are put together only when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
LARGEST_GRID = 65_535
"""Programs along the second or the third dimension of a launch, a limit of CUDA."""


def require(condition: bool, remedy: str, value: object) -> None:
    """Raise ValueError("<remedy>: <value>") unless `condition`."""
    if not condition:
        raise ValueError(f"{remedy}: {value}")


def require_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"convert {name} to one of {names}: {tensor.dtype}")


def require_shape(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """`None` in `shape` fits any size."""
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(
        want != size and want is not None for want, size in zip(shape, sizes, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}]: {list(sizes)}")


def require_device(names_and_tensors: dict[str, Tensor]) -> None:
    """All tensors on one device."""
    if len({tensor.device for tensor in names_and_tensors.values()}) > 1:
        devices = {name: str(tensor.device) for name, tensor in names_and_tensors.items()}
        raise ValueError(f"move all tensors to one device: {devices}")


def require_last_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"make the last dimension of {name} contiguous; its strides: {tensor.stride()}")


def require_grid(name: str, count: int, each: int = 1) -> None:
    """No more of `name` in one call than a launch takes programs; each of them takes `each`."""
    most = LARGEST_GRID // each
    if count > most:
        raise ValueError(f"split the call: Triton takes up to {most} {name} of these shapes at once: {count}")


def require_slots(name: str, slots: Tensor, count: int) -> None:
    """Every slot below `count`; negative ones mean "skip". Reads the values: on a GPU this waits for the device."""
    if slots.numel():
        highest = int(slots.max())
        require(highest < count, f"{name} must name slots of the pool, 0 to {count - 1}, or be negative", highest)


def require_wanted(
    sequence: Tensor, position: Tensor, slots: Tensor, lengths: list[int], count: int
) -> list[tuple[int, int, int]]:
    """The (sequence, position, slot) that are asked for, checked: a place in its sequence of `lengths`, and a slot of
    its own below `count`. Negative slots mean "skip". Reads the values."""
    require_slots("slots", slots, count)
    wanted = [each for each in zip(sequence.tolist(), position.tolist(), slots.tolist(), strict=True) if each[2] >= 0]
    written = [slot for *_, slot in wanted]
    require(len(set(written)) == len(written), "name each slot once", written)
    for at, place, _ in wanted:
        require(0 <= at < len(lengths), f"sequence must be 0 to {len(lengths) - 1}", at)
        require(0 <= place <= lengths[at], f"position must lie in its sequence, 0 to {lengths[at]}", place)
    return wanted


def require_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The bounds of packed sequences, checked: start at 0, never fall, end at `tokens`. Reads the values."""
    require_shape("cu_seqlens", cu_seqlens, [None])
    require_dtype("cu_seqlens", cu_seqlens, INTEGERS)
    bounds = cu_seqlens.tolist()
    require(len(bounds) >= 1 and bounds[0] == 0, "cu_seqlens must start with 0", bounds[:1])
    require(
        all(lo <= hi for lo, hi in pairwise(bounds)),
        "sequence lengths (differences of cu_seqlens) must not be negative",
        bounds,
    )
    require(bounds[-1] == tokens, f"cu_seqlens must end at the number of tokens, {tokens}", bounds[-1])
    return bounds
