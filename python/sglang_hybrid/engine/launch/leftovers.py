"""The files of a server, which SGLang leaves behind when it ends: sockets in the temporary folder, and shared memory.

A container that keeps its `/dev/shm`, 64 MiB by default, would run out of it after a few thousand starts. With several
ranks the third start would end in a bus error: the first rank hands requests to the others through 24 MiB of it.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import Any

_SOCKET = "ipc://"
_mine: list[tuple[int, str]] = []


def note(ports: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of PortArgs.init_new, which names the files: they go when this process ends."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    if not _mine:
        atexit.register(remove)
    names = [name for name in vars(ports).values() if isinstance(name, str) and name.startswith(_SOCKET)]
    _mine.extend(
        (os.getpid(), file)
        for file in (*(name.removeprefix(_SOCKET) for name in names), shm_path_for(ports.instance_id))
    )


def unname(_: Any, queue: Any) -> None:
    """AFTER hook of MessageQueue.wait_until_ready: every reader has the memory open, and nobody needs its name again.

    Whoever has it open keeps it. It goes with the last of them, however they end: a rank is mostly killed.
    """
    ring = queue.buffer
    if ring is not None and ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # it would be removed a second time


def remove() -> None:
    """Remove the files that this process named; one that was copied from it leaves them alone."""
    for process, file in _mine:
        if process == os.getpid():
            with suppress(OSError):
                os.unlink(file)
