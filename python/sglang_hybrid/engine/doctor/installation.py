"""`sglang-hybrid doctor`: the environment as this package sees it, and a remedy beside every problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform as machine
import shutil
from collections.abc import Collection
from dataclasses import dataclass

from sglang_hybrid import __version__
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.machine import memory_bytes
from sglang_hybrid.core.process import allow_files
from sglang_hybrid.engine.doctor import packages
from sglang_hybrid.engine.launch import disaggregation, limits, platform, writable
from sglang_hybrid.engine.surface.rows import full_name
from sglang_hybrid.prefix import FORM

_OPTIONAL = ("triton", "torchvision", "flash-linear-attention", "flashinfer-python", "sglang-kernel")
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
    """Look at interpreter, packages, device, SGLang, its doors, the entry points and the machine's memory."""
    broken = packages.attempt_all()
    findings = [
        Finding("sglang-hybrid", __version__),
        Finding("python", f"{machine.python_version()} on {machine.system()} {machine.machine()}"),
        Finding("prefix cache", FORM),
    ]
    if unwritable := writable.problem():
        findings.append(Finding("folders", "not writable", unwritable))
    for module, distribution in packages.NEEDED.items():
        if problem := broken.get(module):
            findings.append(Finding(distribution, problem.error, problem.remedy))
        else:
            findings.append(Finding(distribution, _version(distribution) or "found, of an unknown version"))
    findings += [Finding(name, version) for name in _OPTIONAL if (version := _version(name))]
    if "torch" not in broken:
        findings.append(_device())
    findings.append(_engine(next(iter(broken), None)))
    findings.append(_transfer(broken))
    findings.append(_entry_points())
    if "torch" not in broken:
        findings.append(_cpu_stand_ins())
    if "psutil" not in broken:
        findings.append(_memory())
    return [*findings, _files(), _shared_memory()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return Finding("device", f"{torch.cuda.device_count()} x {name}, CUDA {torch.version.cuda}")
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if platform.on_cpu():
        if broken := packages.attempt("sglang_hybrid.engine.cpu"):
            return Finding("device", f"CPU, without its stand-ins: {broken.error}", broken.remedy)
        from sglang_hybrid.engine import cpu

        cpu.install()
    problem = None
    if shutil.which("nvidia-smi"):
        problem = "an NVIDIA driver is here but this PyTorch cannot use it; run scripts/setup --profile cuda"
    return Finding("device", f"CPU, {os.cpu_count()} cores", problem)


def _engine(broken: str | None) -> Finding:
    """SGLang, unless a module it builds on is `broken`: its own errors would name the wrong cause."""
    from sglang_hybrid.engine import compat
    from sglang_hybrid.engine.surface import check

    version = _version("sglang")
    if version is None:
        return Finding("sglang", "missing", packages.remedy("sglang"))
    try:
        compat.check_version(version)
        if broken:
            return Finding("sglang", f"{version}, not tried", f"mend {broken} first, then run doctor again")
        if found := packages.attempt_engine([full_name(target) for target in check.required(version)]):
            return Finding("sglang", f"{version}, the import of {found.module} fails: {found.error}", found.remedy)
        return Finding("sglang", f"{compat.check_engine()}, all that is used of it is there")
    except ConfigError as error:
        return Finding("sglang", version, str(error))


_ENGINES = {
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    "nixl": ("nixl-cu12", "nixl-cu13"),
}


def _transfer(broken: Collection[str] = ()) -> Finding:
    """What prefill/decode pairs hand over by; nothing else needs it, so that it is missing is no problem."""
    there = []
    for engine, names in _ENGINES.items():
        installed = next(filter(None, map(_version, names)), None)
        if engine == "nixl" and (installed is None or {"numpy", "torch"} & set(broken)):  # which it imports
            continue
        found = disaggregation.missing(engine)
        if found is None:
            there.append(f"{engine} {installed or 'of an unknown version'}")
        elif found[0] != "missing":
            return Finding("transfer engine", found[0], found[1])
        else:
            there.append(f"no {engine}, which prefill/decode pairs need unless told otherwise: {found[1]}")
    return Finding("transfer engine", "; ".join(there))


def _entry_points() -> Finding:
    groups = ("sglang.srt.platforms", "sglang.srt.plugins")
    found = [group for group in groups if "sglang_hybrid" in importlib.metadata.entry_points(group=group).names]
    allowed = os.environ.get("SGLANG_PLUGINS")
    if len(found) < len(groups):
        return Finding(
            "entry points",
            ", ".join(found) or "none",
            "install this package again: pip install -e .",
        )
    if allowed and "sglang_hybrid" not in map(str.strip, allowed.split(",")):
        return Finding("entry points", ", ".join(found), f"SGLANG_PLUGINS must name sglang_hybrid: {allowed}")
    return Finding("entry points", ", ".join(found))


def _cpu_stand_ins() -> Finding:
    if not platform.on_cpu():
        return Finding("CPU platform", "not active, this is a GPU machine")
    if shutil.which("lscpu") is None:
        return Finding("CPU platform", "no lscpu", "SGLang asks it for cores; install util-linux")
    if broken := packages.attempt("sgl_kernel"):
        return Finding("CPU platform", broken.error, "mend the device first")
    import sgl_kernel

    return Finding("CPU platform", f"sgl_kernel {getattr(sgl_kernel, '__version__', 'unknown')}")


def _memory() -> Finding:
    import psutil

    memory, ours = psutil.virtual_memory(), memory_bytes()
    value = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    if ours < memory.total:
        value += f", {ours / 1e9:.1f} GB for this container or unit"
    low = min(memory.available, ours) < 3e9
    return Finding("memory", value, "a server takes about 2.5 GB before any cache; free some memory" if low else None)


def _files() -> Finding:
    most = allow_files()
    return Finding("open files", f"{most:,}", limits.too_few(most))


def _shared_memory() -> Finding:
    try:
        free_bytes = shutil.disk_usage(limits.SHARED).free
    except OSError:
        return Finding("shared memory", "none", f"SGLang's processes need {limits.SHARED}; mount it")
    low = free_bytes < _LEAST_SHARED_MEMORY_BYTES
    return Finding("shared memory", f"{free_bytes / 1e6:,.0f} MB", "run containers with --shm-size 1g" if low else None)
