"""What the operating system lets a server have: too little ends a start halfway, with an error of something else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import allow_files, room_for_threads

FILES = 128
"""A scheduler has 76 open on a CPU; each connection of a client is one more, in the HTTP process."""

THREADS = 64
"""Of all processes of a server on one core; libraries start one more for each further core, in each of them."""

SHARED = Path("/dev/shm")
SHARED_BYTES = 1 << 20
RING_BYTES = 32 << 20
"""The same where there are several ranks: the first hands requests to the others through 24 MiB of it."""


def check(seen: Any | None) -> None:
    """Raise ConfigError for fewer open files, threads or less shared memory than a start takes.

    `seen` is what early.read found, None where nothing is started. SGLang asks for 65,535 files; where that is more
    than may be had it leaves what there is, usually 1,024.
    """
    most = allow_files()
    if said := too_few(most):
        raise ConfigError(f"{said}: {most}")
    if seen is not None:
        if (room := room_for_threads(THREADS)) < THREADS:
            raise ConfigError(
                f"a server has more processes and threads than may be started here, {THREADS} at least; raise a limit "
                f"(ulimit -Hu, TasksMax= of systemd, docker run --pids-limit, podPidsLimit of a kubelet): {room}"
            )
        check_shared_memory(SHARED_BYTES if seen.tp_size * seen.pp_size == 1 else RING_BYTES)


def too_few(files: int) -> str | None:
    """What to do about so many `files` that may be open; None if they are enough."""
    if files >= FILES:
        return None
    return (
        f"a server opens more files than may be open here, at least {FILES}, and one for each client; raise the limit "
        "(ulimit -Hn, LimitNOFILE= of systemd, docker run --ulimit nofile=65535)"
    )


def check_shared_memory(least: int, folder: Path = SHARED) -> None:
    """Raise ConfigError unless `least` bytes of shared memory are free: whoever writes to more ends in a bus error."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"SGLang's processes share memory here, mount it ({error.strerror}): {folder}") from error
    if free < least:
        raise ConfigError(
            f"SGLang's processes share memory in {folder}, at least {least / 1e6:.0f} MB; remove what is left there, "
            f"or make it larger (docker run --shm-size 1g): {free / 1e6:.1f} MB are free"
        )
