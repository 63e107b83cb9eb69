"""Tensors over reserved ranges: made once, same address for life, whatever is mapped under them.

Torch is given the address through DLPack, which takes the device as stated and does not look at the memory; asking the
driver about a reserved but unmapped address, as other doors do, fails.
"""

import ctypes
from collections.abc import Sequence
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
    """A uint8 tensor of shape [size_bytes] over existing addresses; keeps `owner` alive, copies and touches nothing."""
    kinds = {"cpu": _CPU, "cuda": _CUDA}
    if device.type not in kinds:
        raise ConfigError(f"elastic memory exists on {' and '.join(kinds)}: {device}")
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
    """One tensor per plane of `planes`, each of shape [slots, *shape] and `dtype`, slots = all columns of the layout.

    `first_plane` is the number of the layout's first plane. A slot's elements are contiguous; the stride between
    slots is `planes.slot_bytes`. Only mapped slots may be touched. Raises ConfigError if a slot cannot hold `shape`.
    """
    elements = 1
    for length in shape:
        elements *= length
    if elements * dtype.itemsize > planes.slot_bytes or planes.slot_bytes % dtype.itemsize:
        raise ConfigError(f"slots of {planes.name!r} must hold {elements} x {dtype}: {planes.slot_bytes} bytes")
    inner = [1]
    for length in reversed(shape[1:]):
        inner.insert(0, inner[0] * length)
    slots = layout.columns * layout.column_slots
    strides = [planes.slot_bytes // dtype.itemsize, *(inner if shape else [])]
    before = sum(other.count for other in layout.planes[: layout.planes.index(planes)])
    tensors = []
    for plane in range(first_plane + before, first_plane + before + planes.count):
        flat = bytes_at(backing.address(plane), slots * planes.slot_bytes, device, owner=backing)
        tensors.append(flat.view(dtype).as_strided((slots, *shape), strides))
    return tensors
