"""The compiled form of a package: the same sources as C extensions, used only while they are the same.

`scripts/compile` builds it into `_compiled/<platform>` inside the package, beside a stamp that names the sources it was
built from. `use` puts that folder in front of the package's path if, and only if, the sources still are those; so an
edited source is never shadowed, and another Python or machine finds another folder or none. `SGLANG_HYBRID_COMPILED=0`
keeps to the interpreter.
"""

import hashlib
import os
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

VARIABLE = "SGLANG_HYBRID_COMPILED"
STAMP = "sources"


def sources(package: Path) -> list[Path]:
    """The modules of `package` that are compiled, by name."""
    return sorted(path for path in package.glob("*.py") if path.name != "__init__.py")


def digest(paths: Iterable[Path]) -> str:
    """A name for the content of source files."""
    state = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        state.update(f"{path.name} {len(content)}\n".encode())
        state.update(content)
    return state.hexdigest()


def folder(package: Path) -> Path:
    """Where the compiled form of `package` for this interpreter and platform belongs."""
    return package / "_compiled" / EXTENSION_SUFFIXES[0].split(".")[1]


def status(package: Path) -> str:
    """ "compiled", or "interpreted" and why."""
    if os.environ.get(VARIABLE) == "0":
        return f"interpreted: {VARIABLE}=0"
    try:
        stamp = (folder(package) / STAMP).read_text(encoding="ascii").strip()
    except OSError:
        return "interpreted: scripts/compile has not run, or found no C compiler"
    if stamp != digest(sources(package)):
        return "interpreted: the sources have changed since scripts/compile"
    return "compiled"


def use(path: list[str]) -> str:
    """Let the package with this `__path__` import its compiled form if it is true; returns its `status`."""
    package = Path(path[0])
    found = status(package)
    if found == "compiled":
        path.insert(0, str(folder(package)))
    return found
