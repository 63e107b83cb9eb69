"""Chooses an operation's backend: Triton where a tensor lies on a GPU, the naive specification elsewhere.

The environment variable SGLANG_HYBRID_KERNELS overrules it and is read once: `auto` (default), `naive` (everywhere, to
tell a kernel's fault from another's), `triton` (everywhere; on CPU tensors Triton needs its interpreter,
TRITON_INTERPRET=1).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Backend = Literal["triton", "naive"]

VARIABLE = "SGLANG_HYBRID_KERNELS"
_MODES = ("auto", "naive", "triton")


@functools.cache
def mode() -> str:
    """The value of SGLANG_HYBRID_KERNELS at the first call. Raises ValueError if it is none of auto, naive, triton."""
    value = os.environ.get(VARIABLE, "auto")
    if value not in _MODES:
        raise ValueError(f"set {VARIABLE} to one of {', '.join(_MODES)}: {value!r}")
    if value == "triton" and not _has_triton():
        raise ValueError(f"install triton, or set {VARIABLE} to auto or naive: {value!r}")
    return value


def backend_for(tensor: Tensor) -> Backend:
    """The backend of a call whose tensors lie where `tensor` lies."""
    return _backend(tensor.device.type)


def operations() -> tuple[str, ...]:
    """Names of all operations, sorted: the folders that hold a `naive.py`."""
    return tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/naive.py")))


def describe(device_type: str | None = None) -> dict[str, Backend]:
    """Operation -> backend for tensors on `device_type`, by default "cuda" where PyTorch finds a GPU, else "cpu"."""
    if device_type is None:
        import torch

        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return dict.fromkeys(operations(), _backend(device_type))


def _backend(device_type: str) -> Backend:
    if mode() == "auto":
        return "triton" if device_type == "cuda" and _has_triton() else "naive"
    return "triton" if mode() == "triton" else "naive"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
