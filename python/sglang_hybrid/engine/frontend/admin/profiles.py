"""Profiles that cannot be made are refused: SGLang's scheduler would end on them, in the middle of requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation.limits import shown
from sglang_hybrid.engine.launch import platform

_ON_CPU = ("CPU", "GPU")
"""What SGLang records unless told otherwise: PyTorch leaves the second out where there is none."""

_ACTIVITIES = (*_ON_CPU, "MEM", "CUDA_PROFILER", "RPD", "XPU")


def check(_: Any, request: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of TokenizerManager.start_profile."""
    if request is None:
        return
    for name in ("num_steps", "start_step"):
        if (steps := getattr(request, name)) is not None and steps < 1:
            raise ConfigError(f"{name} is 1 or more, or left out: {shown(steps)}")
    if request.profile_by_stage and platform.on_cpu():
        raise ConfigError("PyTorch's profiler ends a scheduler that profiles stage by stage on a CPU; profile them "
                          "together, with num_steps: profile_by_stage true")  # fmt: skip
    if request.profile_by_stage and request.num_steps is None:
        raise ConfigError("profile_by_stage needs num_steps, the passes of each stage: null")
    _check_activities(request.activities)
    for name in ("profile_id", "profile_prefix"):
        if "/" in (getattr(request, name) or ""):
            raise ConfigError(f"{name} becomes a part of the traces' names; put folders into output_dir: "
                              f"{shown(getattr(request, name))}")  # fmt: skip
    folder = Path(request.output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp")).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("Permission denied")
    except OSError as error:
        raise ConfigError(
            f"no trace can be written there ({error.strerror or error}); name another output_dir: {shown(str(folder))}"
        ) from error


def _check_activities(names: list[str] | None) -> None:
    if names is None:
        return
    known = _ON_CPU if platform.on_cpu() else _ACTIVITIES
    for name in names:
        if name not in known:
            raise ConfigError(f"activities here are of {', '.join(known)}: {shown(name)}")
    if not names or (platform.on_cpu() and "CPU" not in names):
        raise ConfigError(f"activities name what is recorded, such as CPU: {shown(names)}")
