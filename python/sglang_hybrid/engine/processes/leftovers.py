"""The files of a server, which SGLang leaves behind when it ends: sockets and metrics in the temporary folder, and
shared memory.

A container that keeps its `/dev/shm`, 64 MiB by default, would run out of it after a few thousand starts. With several
ranks the third start would end in a bus error: the first rank hands requests to the others through 24 MiB of it.

A first process that is killed removes nothing. So it writes down what it named, in a file that it holds locked, and the
next start removes what stands in such a file that nobody holds.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_SOCKET = "ipc://"
_RECORD = "sglang-hybrid-files-"
_SHARED = "/dev/shm"
_mine: list[tuple[int, str]] = []
_routers: list[tuple[int, Any]] = []
"""What knows the sockets of HTTP workers, each of which names its own and is ended by a signal."""
_held: list[int] = []
"""The file that this process holds, open."""
_told: list[Path] = []
"""Where the controller of data-parallel replicas, which is killed, writes what it names: beside a file of the first."""


def note(ports: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of PortArgs.init_new, which names the files: they go when this process ends."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    if not _mine:
        atexit.register(remove)
    if not _mine and not _told:
        _sweep()
    names = [name for name in vars(ports).values() if isinstance(name, str)]
    files = [*_files(names), shm_path_for(ports.instance_id)]
    _mine.extend((os.getpid(), file) for file in files)
    if not _told:
        _write_down(files)
    for place in _told:
        with place.open("a") as told:
            told.writelines(f"{file}\n" for file in files)


def _write_down(files: list[str]) -> None:
    """A full disk is no reason not to start."""
    with suppress(OSError):
        if not _held:
            number, name = tempfile.mkstemp(prefix=_RECORD)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held.append(number)
            _mine.append((os.getpid(), name))
        metrics = getattr(_metrics(), "name", None)
        os.write(_held[0], "".join(f"{name}\n" for name in (*files, metrics) if name).encode())


def _sweep() -> None:
    """Remove what processes that are no more wrote down: of this user, and where SGLang puts such files."""
    folder = tempfile.gettempdir()
    for record in Path(folder).glob(f"{_RECORD}*"):
        with suppress(OSError, UnicodeDecodeError):
            number = os.open(record, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(number) as file:
                found = os.fstat(number)
                if found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_nlink != 1:
                    continue  # anybody may write into that folder
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in file.read().splitlines():
                    _remove_one(name, (folder, _SHARED))
            record.unlink()


def _remove_one(name: str, folders: tuple[str, str]) -> None:
    """Remove a file or a folder of metrics that lies in one of `folders`, and what its replicas wrote down."""
    if os.path.dirname(name) not in folders or os.path.islink(name):
        return
    if os.path.isdir(name):  # of metrics
        shutil.rmtree(name, ignore_errors=True)
        return
    with suppress(OSError):
        for named in _beside(name).read_text().splitlines():
            _remove_one(named, folders)
        _beside(name).unlink()
    with suppress(OSError):
        os.unlink(name)


def tell(_controller: Any, _server_args: Any, ports: Any) -> None:
    """BEFORE hook of DataParallelController.launch_dp_schedulers, which names sockets for each replica."""
    _told[:] = map(_beside, _files([ports.tokenizer_ipc_name]))


def _beside(file: str) -> Path:
    return Path(f"{file}.replicas")


def note_workers(_: Any, router: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of MultiTokenizerRouter.__init__, before the workers are told where their arguments are."""
    _routers.append((os.getpid(), router))
    _mine.append((os.getpid(), f"{_SHARED}/multi_tokenizer_args_{os.getpid()}"))


def _files(names: Iterable[str]) -> Iterator[str]:
    return (name.removeprefix(_SOCKET) for name in names if name.startswith(_SOCKET))


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
    mine = [file for process, file in _mine if process == os.getpid()]
    routers = [router for process, router in _routers if process == os.getpid()]
    for file in (*mine, *(file for router in routers for file in _files(set(router.all_worker_ipcs)))):
        _remove_one(file, (os.path.dirname(file), _SHARED))
    if not mine:
        return
    if (metrics := _metrics()) is not None:
        with suppress(OSError):  # a child that is just being killed may still write into it
            metrics.cleanup()
    while _held:
        os.close(_held.pop())


def _metrics() -> Any:
    """The folder of metrics, if this process has one of its own."""
    return getattr(sys.modules.get("sglang.srt.utils.common"), "prometheus_multiproc_dir", None)
