"""Rank 1 of a server whose first GPU is 2: memory, access, waiting and tensors are of GPU 3, not of the current one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device import tensors
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.memory.backing import Run

G = 2 << 20
GPU = 3


def test_the_driver_works_on_its_own_gpu_and_leaves_the_current_one(cuda: Any) -> None:
    driver = CudaDriver(GPU, api=cuda)
    assert driver._properties.location.id == driver._access.location.id == GPU
    with PooledBacking(driver, [4], G, limit=4) as backing:
        backing.map([Run(0, 0, 2)])
        backing.unmap([Run(0, 0, 2)])
    assert {name for name, _ in cuda.worked_on} >= {"cuMemGetInfo", "cuCtxSynchronize"}
    assert {gpu for _, gpu in cuda.worked_on} == {GPU}
    assert cuda.current() == 0, "torch's current GPU stays what it was"


def test_a_call_that_fails_leaves_the_current_gpu_too(cuda: Any) -> None:
    driver = CudaDriver(GPU, api=cuda)
    cuda.fail["cuCtxSynchronize"] = [cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED]
    with pytest.raises(ConfigError, match="cuCtxSynchronize"):
        driver.synchronize()
    assert cuda.current() == 0


def header(capsule: Any) -> Any:
    """The tensor that a DLPack capsule describes."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return tensors._Managed.from_address(get(capsule, b"dltensor")).tensor


def test_a_tensor_says_which_gpu_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []

    def read(capsule: Any) -> torch.Tensor:
        found = header(capsule)
        said.append((found.device_type, found.device_id))
        return torch.empty(0, dtype=torch.uint8)

    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", read)
    tensors.bytes_at(1 << 40, G, torch.device("cuda", GPU))
    tensors.bytes_at(1 << 40, G, torch.device("cpu"))
    assert said == [(2, GPU), (1, 0)]


def test_a_gpu_without_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="such as cuda:0: cuda"):
        tensors.bytes_at(1 << 40, G, torch.device("cuda"))
