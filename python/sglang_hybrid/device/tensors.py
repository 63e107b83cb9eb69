"""Tensors over reserved ranges: made once, same address for life, whatever is mapped under them.

Torch is given the address through DLPack, which takes the device as stated and does not look at the memory; asking the
driver about a reserved but unmapped address, as other doors do, fails.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.memory.layout import Layout, Planes

_CPU, _CUDA, _UINT = 1, 2, 1  # DLDeviceType and DLDataTypeCode


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_alive: dict[int, tuple[Any, ...]] = {}  # what a capsule points at, until torch calls its deleter


def _forget(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_delete = _Deleter(_forget)


def bytes_at(address: int, size_bytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """A uint8 tensor of shape [size_bytes] over existing addresses; keeps `owner` alive, copies and touches nothing.

    A GPU needs its index: kernels run where the tensor says it is, whichever device is current.
    """
    kinds = {"cpu": _CPU, "cuda": _CUDA}
    if device.type not in kinds:
        raise ConfigError(f"elastic memory exists on {' and '.join(kinds)}: {device}")
    if device.type == "cuda" and device.index is None:
        raise ConfigError(f"name the GPU whose memory it is, such as cuda:0: {device}")
    shape = (ctypes.c_int64 * 1)(size_bytes)
    managed = _Managed()
    managed.tensor = _DLTensor(address, kinds[device.type], device.index or 0, 1, _UINT, 8, 1, shape, None, 0)
    managed.deleter = _delete
    _alive[ctypes.addressof(managed)] = (managed, shape, owner)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    flat: torch.Tensor = torch.utils.dlpack.from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))
    return flat


def plane_tensors(
    backing: PooledBacking,
    layout: Layout,
    planes: Planes,
    first_plane: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """One tensor per plane of `planes`, each of shape [slots, *shape] and `dtype`; slots = all columns.

    `first_plane` is the number of the layout's first plane. A slot's elements are contiguous; the stride between
    slots is `planes.slot_bytes`. Only mapped slots may be touched. Raises ConfigError if a slot cannot hold `shape`.
    """
    return list(
        _rows(backing, layout, planes, first_plane, Rows(planes.count, tuple(shape), dtype), 0, device).unbind()
    )


@dataclass(frozen=True)
class Rows:
    """`count` rows (one per layer) of `shape` and `dtype`, one after the other in every slot."""

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


def page_major_tensors(
    backing: PooledBacking, layout: Layout, first_plane: int, rows: Sequence[Rows], device: torch.device
) -> list[torch.Tensor]:
    """Tensors over a layout of one plane whose slots hold all layers side by side: `rows[0]`, then `rows[1]`, ...

    One tensor per entry of `rows`, of shape [count, slots, *shape]; [layer] of it is strided by whole slots. Raises
    ConfigError if the slot cannot hold all rows, or a row would not be aligned to its dtype.
    """
    (planes,) = layout.planes
    offset, tensors = 0, []
    for each in rows:
        tensors.append(_rows(backing, layout, planes, first_plane, each, offset, device))
        offset += each.count * each.row_bytes
    return tensors


def _rows(
    backing: PooledBacking,
    layout: Layout,
    planes: Planes,
    first_plane: int,
    rows: Rows,
    offset_bytes: int,
    device: torch.device,
) -> torch.Tensor:
    """Rows over planes of their own (one row per plane), or `offset_bytes` into the slots of a single plane."""
    item = rows.dtype.itemsize
    inside = planes.count == 1
    held_bytes = rows.row_bytes * (rows.count if inside else 1)
    if offset_bytes + held_bytes > planes.slot_bytes or planes.slot_bytes % item or offset_bytes % item:
        raise ConfigError(
            f"slots of {planes.name!r} must hold {rows.count} x {rows.shape} of {rows.dtype} at byte {offset_bytes}: "
            f"{planes.slot_bytes} bytes"
        )
    plane = first_plane + sum(other.count for other in layout.planes[: layout.planes.index(planes)])
    sizes = backing.plane_granules[plane : plane + planes.count]
    needed = layout.span(planes, layout.columns - 1)[1]
    if len(sizes) < planes.count or len(set(sizes)) != 1 or sizes[0] < needed:
        raise ConfigError(f"build the backing from the plane_granules of its layouts; {planes.name!r} differs: {sizes}")
    plane_bytes = sizes[0] * layout.granule_bytes
    distance = rows.row_bytes if inside else plane_bytes
    inner = [math.prod(rows.shape[axis + 1 :]) for axis in range(len(rows.shape))]
    flat = bytes_at(backing.address(plane), planes.count * plane_bytes, device, owner=backing)
    slots = layout.columns * layout.column_slots
    strides = (distance // item, planes.slot_bytes // item, *inner)
    return (
        flat[: len(flat) // item * item]
        .view(rows.dtype)
        .as_strided((rows.count, slots, *rows.shape), strides, offset_bytes // item)
    )
