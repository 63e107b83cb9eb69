"""The folders that PyTorch and SGLang write into while they are imported.

A user without a home and a container whose disk is read-only may have neither, and their own errors name no remedy.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sglang_hybrid.core.errors import ConfigError, IncompatibleEngine
from sglang_hybrid.engine import compat

_CACHE = "~/.cache/sglang"
"""Where SGLang keeps compiled kernels unless SGLANG_CACHE_DIR says otherwise."""

_SOCKET_PATH = 107  # bytes, of Linux
_LONGEST = _SOCKET_PATH - len("/tmp12345678")


def check() -> None:
    """Raise ConfigError for a temporary folder that holds no sockets, or where that of kernels cannot be made."""
    if said := problem():
        raise ConfigError(said)


def problem() -> str | None:
    """What is wrong and what to do; None if the folders are there or could be made."""
    try:
        temporary = os.fsencode(tempfile.gettempdir())
    except FileNotFoundError as error:
        return f"no temporary folder can be written; name one in TMPDIR, or mount a volume at /tmp: {error.strerror}"
    if len(temporary) > _LONGEST:
        return (
            f"sockets lie in the temporary folder, and the path of one has {_SOCKET_PATH} bytes at most; name a folder "
            f"of up to {_LONGEST} in TMPDIR: {os.fsdecode(temporary)}"
        )
    name, folder = _kernels()
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return (
            f"the folder for compiled kernels cannot be made; name one that this user may write in {name}: "
            f"{error.strerror}: {folder}"
        )
    return None


def _kernels() -> tuple[str, Path | None]:
    """The variable that names the folder, and the folder; None where PyTorch takes the temporary one."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is not None:
        return "TORCHINDUCTOR_CACHE_DIR", Path(named)
    try:
        redirected = compat.at_least("0.5.21")
    except IncompatibleEngine:  # none is installed, which others say
        redirected = False
    if not redirected:
        return "TMPDIR", None
    base = os.path.expanduser(os.environ.get("SGLANG_CACHE_DIR", _CACHE))
    return "SGLANG_CACHE_DIR", Path(base, "inductor")
