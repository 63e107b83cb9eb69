"""Which machine this is, decided before SGLang is imported."""

from __future__ import annotations

import os


def on_cpu() -> bool:
    """Whether this process and those that it starts serve on a CPU, by the variable that SGLang reads."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def cuda_devices() -> int:
    """CUDA devices that PyTorch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def wants_cpu(arguments: list[str]) -> bool:
    """Whether to serve on the CPU: asked for by flag or environment, or nothing else is there."""
    device = _device(arguments)
    if device is not None:
        return device == "cpu"
    return on_cpu() or cuda_devices() == 0


def _device(arguments: list[str]) -> str | None:
    flag, value = "--device", None
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(flag + "="):
            value = argument.partition("=")[2]
    return value
