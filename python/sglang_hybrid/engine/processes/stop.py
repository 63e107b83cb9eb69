"""How a server stops: the first process decides, and takes the others with it.

systemd, `timeout`, Ctrl-C and a terminal that is closed send their signal to every process of the group. A scheduler
that ends by itself looks like a crash to SGLang: it reports one, and kills the server instead of letting it finish its
requests.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from multiprocessing.connection import wait
from pickle import UnpicklingError
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import Any

from sglang_hybrid.core import process
from sglang_hybrid.engine.processes import leftovers

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell gives it."""

DIED = 1
"""Exit status of a server that cannot go on."""

_NEVER_STARTED = 3
"""Exit status of uvicorn's."""

_OF_PARENT = (signal.SIGTERM, signal.SIGINT)
_HELD_BACK = (*_OF_PARENT, signal.SIGHUP)
_CHILD = "from multiprocessing.spawn "
"""How the code begins that a spawned child runs. The resource tracker, started the same way, outlives its parent."""

_PATIENCE_S = 10
_LOOK_S = 0.5
over = Event()
"""Set where a server ends the processes that are left: none of them has crashed."""

asked: ContextVar[bool] = ContextVar("asked", default=False)
"""Whether what runs here ends a server because somebody asked for it (`frontend/server/drain.py`)."""

_missed: list[int] = []
_CAUSES = {
    signal.SIGKILL: "The operating system killed {}, most often for memory: lower --mem-fraction-static (GPU) or "
    "--hybrid-cpu-memory-gb (CPU).",
    signal.SIGBUS: "A bus error ended {}, most often because /dev/shm is full: make it larger (docker run --shm-size "
    "1g).",
}
spared: list[Callable[[bool], bool]] = []
"""Asked whether this process, or what is below it, is not SGLang's to kill."""
_keepers: list[ThreadPoolExecutor | None] = []
"""Threads that are the parents of children."""
_supervisors: list[Any] = []
"""uvicorn's, of HTTP workers."""


def hold_back_in_children() -> None:
    """In the first process: a spawned child starts with these signals blocked, until it calls `leave_to_parent`.

    Python's own start and its imports take half a second, and would end with a traceback. A mask is inherited where a
    handler is not. Only for a main module whose children call `leave_to_parent`: others would outlive `terminate`.
    """
    from multiprocessing import util

    spawn = util.spawnv_passfds

    util.spawnv_passfds = partial(_spawn, spawn)


@contextmanager
def held_back_in_spawned() -> Iterator[None]:
    """While it lasts, a spawned child starts with these signals blocked, for good: who started it ends it by SIGKILL.

    It also ends when its parent does, from its first line on. SGLang binds its children seconds later, after their
    imports: of a script that was ended meanwhile the detokenizer stayed, and a scheduler sent SIGQUIT to whoever was
    its parent by then.

    In a thread, another one starts it, which ends with the process: to the kernel, a child's parent is the thread that
    started it.
    """
    from multiprocessing import util

    spawn = util.spawnv_passfds
    keeper = None if current_thread() is main_thread() else ThreadPoolExecutor(1, "keeps-children")

    def blocked(path: bytes, command: list[str | bytes], files: Any) -> int:
        if keeper is not None and current_thread() is not main_thread():
            return keeper.submit(_spawn, spawn, path, _bound(command), files).result()
        return _spawn(spawn, path, _bound(command), files)

    util.spawnv_passfds = blocked
    _keepers.append(keeper)
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def bind_spawned(*_: Any, **__: Any) -> None:
    """BEFORE hook of DataParallelController.__init__: the schedulers that it starts end with it, from their first line.

    Of a script that was ended while they imported they stayed, each with its model. Their threads never end.
    """
    from multiprocessing import util

    spawn = util.spawnv_passfds
    util.spawnv_passfds = lambda path, command, files: spawn(path, _bound(command), files)


def _bound(command: list[str | bytes]) -> list[str | bytes]:
    return [process.bound(word) if str(word).startswith(_CHILD) else word for word in command]


def _spawn(spawn: Callable[..., int], *arguments: Any) -> int:
    with held_back():
        return spawn(*arguments)


@contextmanager
def held_back() -> Iterator[None]:
    """While it lasts, these signals are blocked: in this thread, and in a child that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def without_signals(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of a command that SGLang runs in a child that starts: no signal to the group ends it halfway."""
    with held_back():
        return original(*args, **kwargs)


def leave_to_parent() -> None:
    """In a spawned child: outlive signals to the group. The child ends when its parent does, or kills it."""
    for number in _OF_PARENT:
        signal.signal(number, lambda number, _: _missed.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the first process makes a SIGTERM of it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def repeat_missed() -> None:
    """In a child that has handlers of its own by now: let them see a signal that came before them.

    uvicorn stops its workers by SIGTERM and waits for them, and one may still be importing.
    """
    while _missed:
        signal.raise_signal(_missed.pop())


@contextmanager
def quick_end() -> Iterator[None]:
    """While it lasts, Ctrl-C and SIGTERM end this process and its children at once, without a traceback or a file left.

    An exception would be reported by whatever it interrupts, and may be lost there. Requests that run are another
    matter: uvicorn has taken the signals over by then, finishes them, and repeats Ctrl-C. A closed terminal is a
    SIGTERM, but for a server that was started to outlive it (`nohup`).
    """
    if current_thread() is not main_thread():
        yield
        return
    import psutil  # noqa: F401  # for `_end`: an import there may meet the same one half done

    before = {number: signal.signal(number, _end) for number in _OF_PARENT}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # SGLang's watchdog would report the children that end here
    try:
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    finally:
        leftovers.remove()
        if number == signal.SIGINT:
            os._exit(INTERRUPTED)
        signal.signal(number, signal.SIG_DFL)  # as who waits for this process expects it
        signal.raise_signal(number)
        os._exit(128 + number)  # the first process of a container: the kernel sends it nothing that would end it


def keep_handlers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """AROUND hook of uvicorn's Multiprocess.__init__, which takes every signal over and knows but four of them.

    One is SGLang's: a server of which a process died is told so by SIGQUIT, and would neither answer nor end.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGHUP)}
    original(*args, **kwargs)
    _supervisors.append(args[0])
    for number, handler in before.items():
        signal.signal(number, handler)


def answers(_: Callable[..., bool], worker: Any, timeout: float = 5) -> bool:
    """AROUND hook of uvicorn's Process.ping, which waits all of `timeout` for one that ends instead of answering.

    The two minutes that an import may take are two minutes without a worker then. Nor do signals wait for an answer.
    """
    waited_s = 0.0
    with suppress(OSError, EOFError, UnpicklingError):
        worker.parent_conn.send(b"ping")
        while not wait([worker.parent_conn, worker.process.sentinel], _LOOK_S):
            waited_s += _LOOK_S
            if any(supervisor.signal_queue for supervisor in _supervisors):
                return True
            if waited_s >= timeout:
                return False
        if worker.parent_conn.poll():
            worker.parent_conn.recv()
            return True
    return False


def status() -> int:
    """With which a server ends that nothing has killed: uvicorn says nothing of a worker that never served."""
    workers = [worker for supervisor in _supervisors for worker in supervisor.processes]
    return DIED if any(worker.exitcode == _NEVER_STARTED for worker in workers) else 0


def cause(watchdog: Any) -> str:
    """Why a process that SGLang's `watchdog` watches ended, as far as its status says; `watchdog` may be None."""
    watched = zip(watchdog._names, watchdog._processes, strict=True) if watchdog is not None else ()
    ended = {name: process.exitcode for name, process in watched}
    for number, said in _CAUSES.items():
        if names := ", ".join(name for name, status in ended.items() if status == -number):
            return said.format(names)
    return "Its own message stands above."


def end_with_status(original: Callable[..., Any], pid: int | None, include_parent: bool = True, **others: Any) -> Any:
    """AROUND hook of `kill_process_tree`: a process that ends itself does so with status 1, after its children.

    SGLang sends it SIGKILL: that looks like the kernel's out-of-memory killer (137), and children outlive it. In 0.5.17
    a server that was told to stop comes here too, once all requests have ended: its status is 0. A process that merely
    has engines does not end.
    """
    if pid == os.getpid() and any(spares(include_parent) for spares in spared):
        return None
    if pid != os.getpid() or not include_parent:
        return original(pid, include_parent, **others)
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    with suppress(RuntimeError):  # one is not gone in time
        original(pid, include_parent=False, wait_timeout=_PATIENCE_S)
    leftovers.remove()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it was closed before the start; nobody reads; no room
            stream.flush()
    os._exit(0 if asked.get() else DIED)
