"""Which machine this is, decided before SGLang is imported."""

from __future__ import annotations

import os


def cuda_devices() -> int:
    """CUDA devices that PyTorch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def wants_cpu(arguments: list[str]) -> bool:
    """Whether to serve on the CPU: asked for by flag or environment, or nothing else is there."""
    device = _value_of("--device", arguments)
    if device is not None:
        return device == "cpu"
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or cuda_devices() == 0


def _value_of(flag: str, arguments: list[str]) -> str | None:
    value = None
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(flag + "="):
            value = argument.partition("=")[2]
    return value
