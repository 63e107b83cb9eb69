"""Which of the packages that a server needs import here, and the command that mends each that does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import writable

NEEDED = {
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "xgrammar": "xgrammar",
    "openai": "openai",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "zmq": "pyzmq",
    "psutil": "psutil",
    "prometheus_client": "prometheus_client",
}
"""Distribution by module. What else is missing comes out when SGLang is imported."""

_BUILD_ON = {"transformers": ("numpy", "torch"), "xgrammar": ("numpy", "torch", "transformers")}

TORCHVISION = "0.28.0"
"""The version beside our PyTorch; scripts/setup installs it, without what it depends on."""

_CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"
_SETUP = Path(__file__).parents[4] / "scripts" / "setup"


@dataclass(frozen=True, slots=True)
class Broken:
    """A module that does not import: `error` says why, `remedy` what to run."""

    module: str
    error: str
    remedy: str


def attempt_all() -> dict[str, Broken]:
    """What is wrong, by module. One that builds on a broken one is not tried: its error would be the other's."""
    broken: dict[str, Broken] = {}
    for module in NEEDED:
        waits = [other for other in _BUILD_ON.get(module, ()) if other in broken]
        found = Broken(module, "not tried", f"mend {waits[0]} first") if waits else attempt(module)
        if found is not None:
            broken[module] = found
    return broken


def attempt(module: str) -> Broken | None:
    """Import `module`; None if it is there and works. A package can be broken in any way, and none ends the report."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package does wrong while it is imported
        named = error.name if isinstance(error, ImportError) and error.name else module
        culprit = named.partition(".")[0]  # what it builds on, perhaps
        absent = isinstance(error, ModuleNotFoundError)
        said = "missing" if absent and named == module else " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, OSError) and writable.problem():
            return Broken(module, said, "mend the folders first")
        return Broken(module, said, remedy(culprit, reinstall=not absent))
    return None


def attempt_engine(targets: list[str]) -> Broken | None:
    """Import the modules of SGLang that `targets` lie in; None as well if only names of SGLang's own are gone."""
    for module in dict.fromkeys(["sglang", *(target.partition(":")[0] for target in targets)]):
        broken = attempt(module)
        if broken is not None and not _GONE.match(broken.error):
            return broken
    return None


_GONE = re.compile(
    r"(missing$|ModuleNotFoundError: No module named 'sglang\.|ImportError: cannot import .* from 'sglang)"
)


def remedy(module: str, *, reinstall: bool = False) -> str:
    """The command that installs what `module` comes in, in a checkout or beside a wheel."""
    if module.startswith("sglang_hybrid"):
        return "install this package again, from its checkout or wheel; PYTHONPATH may name a part of another copy"
    gpu = shutil.which("nvidia-smi") is not None
    command = "pip install --force-reinstall --no-deps" if reinstall else "pip install"
    if module in ("sglang", "torchvision"):
        needed = f"sglang=={compat.PRIMARY}" if gpu else f"sglang=={compat.PRIMARY} torchvision=={TORCHVISION}"
        command = command if reinstall or gpu else f"{command} --no-deps"
    else:
        needed = _requirement(NEEDED.get(module, module))
    index = f" {_CPU_INDEX}" if module == "torch" and not gpu else ""
    line = f"{command} {needed}{index}"
    return f"run scripts/setup, or {line}" if _SETUP.is_file() else f"run {line}"


def _requirement(distribution: str) -> str:
    """With the version that this release asks for."""
    try:
        lines = importlib.metadata.requires("sglang-hybrid") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        stated = line.partition(";")[0].strip()
        if re.split(r"[<>=!~ \[]", stated)[0].lower() == distribution.lower() and "==" in stated:
            return stated
    return distribution
