"""The children of a server on a CPU: copies of the first process, which has imported all that they need.

SGLang spawns them: each starts Python and imports PyTorch, transformers and SGLang again, ten seconds of a core.
A copy has them at once, and shares their memory. SGLang's reason to spawn is CUDA, which does not survive a copy; nor
does a lock that another thread holds, so a process with more than one thread spawns as before.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import context, popen_fork, popen_spawn_posix, spawn
from pathlib import Path
from typing import Any

from sglang_hybrid.core.process import collect_as_usual, die_with_announced_parent
from sglang_hybrid.engine.launch import port
from sglang_hybrid.engine.processes import stop

_TASKS = Path("/proc/self/task")
_SURVIVES = "jemalloc_bg_thd"
"""The thread of PyArrow's allocator, which prepares itself for a copy."""


def keep_one_thread() -> None:
    """Before NumPy is imported: its OpenBLAS starts a thread per core, for matrix products that no server computes."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def copy_instead_of_spawn() -> None:
    """In the first process, on a CPU: what `multiprocessing.Process` starts from here on is a copy where it can be."""
    context.Process._Popen = staticmethod(_start)  # type: ignore[attr-defined]


def can_be_copied() -> bool:
    """Whether this process has one thread, and its children need no other executable (SGLang's `--numa-node`)."""
    if not _TASKS.is_dir() or os.fsdecode(spawn.get_executable()) != sys.executable:
        return False
    names = [Path(task, "comm").read_text().strip() for task in _TASKS.iterdir()]
    return len(names) - names.count(_SURVIVES) == 1


def _start(process: Any) -> popen_fork.Popen:
    if not can_be_copied():
        return popen_spawn_posix.Popen(process)
    gc.freeze()  # what was imported stays; to look at it again would copy its pages
    process._bootstrap = partial(_begin, process._bootstrap)
    with stop.held_back():
        return popen_fork.Popen(process)


def _begin(bootstrap: Callable[..., int], **arguments: Any) -> int:
    """In the copy: what `launch_server` does where a spawned child imports it."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the first process ends all others on it
    stop.leave_to_parent()
    die_with_announced_parent()
    port.release()
    collect_as_usual()
    _use_threads(os.environ.get("OMP_NUM_THREADS", ""))
    return bootstrap(**arguments)


def _use_threads(said: str) -> None:
    """OpenMP reads that variable when PyTorch is imported, which was before it was set."""
    first = said.partition(",")[0].strip()
    if first.isdecimal() and int(first) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(first))
