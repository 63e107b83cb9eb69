"""`sglang-hybrid doctor`: the environment as this package sees it, and a remedy beside every problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform as machine
import shutil
from dataclasses import dataclass

from sglang_hybrid import __version__
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import cpu
from sglang_hybrid.prefix import FORM

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-linear-attention",
    "flashinfer-python",
    "sglang-kernel",
    "openai",
)
_LEAST_SHARED_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `problem` says what to do, and is None where all is well."""

    subject: str
    value: str
    problem: str | None = None

    def __str__(self) -> str:
        mark = "PROBLEM" if self.problem else "ok"
        return f"{mark:<8} {self.subject:<18} {self.value}" + (f"\n         -> {self.problem}" if self.problem else "")


def examine() -> list[Finding]:
    """Look at interpreter, device, SGLang, its doors, the entry points and the machine's memory."""
    findings = [
        Finding("sglang-hybrid", __version__),
        Finding("python", f"{machine.python_version()} on {machine.system()} {machine.machine()}"),
        Finding("prefix cache", FORM),
        _device(),
    ]
    findings += [Finding(name, version) for name in _PACKAGES if (version := _version(name))]
    findings += [_engine(), _entry_points(), _cpu_stand_ins(), _memory(), _shared_memory()]
    return findings


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("device", "unknown", "PyTorch is not installed; run scripts/setup")
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return Finding("device", f"{torch.cuda.device_count()} x {name}, CUDA {torch.version.cuda}")
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if os.environ["SGLANG_USE_CPU_ENGINE"] == "1":
        cpu.install()
    problem = None
    if shutil.which("nvidia-smi"):
        problem = "an NVIDIA driver is here but this PyTorch cannot use it; run scripts/setup --profile cuda"
    return Finding("device", f"CPU, {os.cpu_count()} cores", problem)


def _engine() -> Finding:
    from sglang_hybrid.engine import compat

    try:
        return Finding("sglang", f"{compat.check_engine()}, all that is used of it is there")
    except ConfigError as error:
        return Finding("sglang", _version("sglang") or "missing", str(error))


def _entry_points() -> Finding:
    groups = ("sglang.srt.platforms", "sglang.srt.plugins")
    found = [group for group in groups if "sglang_hybrid" in importlib.metadata.entry_points(group=group).names]
    allowed = os.environ.get("SGLANG_PLUGINS")
    if len(found) < len(groups):
        return Finding("entry points", ", ".join(found) or "none", "reinstall this package: pip install -e .")
    if allowed and "sglang_hybrid" not in allowed.split(","):
        return Finding("entry points", ", ".join(found), f"SGLANG_PLUGINS must name sglang_hybrid: {allowed}")
    return Finding("entry points", ", ".join(found))


def _cpu_stand_ins() -> Finding:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return Finding("CPU platform", "not active, this is a GPU machine")
    if shutil.which("lscpu") is None:
        return Finding("CPU platform", "no lscpu", "SGLang asks it for cores; install util-linux")
    import sgl_kernel

    return Finding("CPU platform", f"sgl_kernel {getattr(sgl_kernel, '__version__', 'unknown')}")


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    value = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    low = memory.available < 3e9
    return Finding("memory", value, "a server takes about 2.5 GB before any cache; free some memory" if low else None)


def _shared_memory() -> Finding:
    try:
        free_bytes = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("shared memory", "none", "SGLang's processes need /dev/shm; mount it")
    low = free_bytes < _LEAST_SHARED_MEMORY_BYTES
    return Finding("shared memory", f"{free_bytes / 1e6:,.0f} MB", "run containers with --shm-size 1g" if low else None)
