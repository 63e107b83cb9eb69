"""Processes of a server: children that end when their parent does, however it ends; a start that is not held up."""

import contextlib
import ctypes
import gc
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading

_PR_SET_PDEATHSIG = 1
_FILES = 65_535  # as SGLang
_PARENT_KEY = "SGLANG_HYBRID_PARENT"


def take_care_of_files() -> None:
    """At the start of a server: what it opens is no standard stream, and nobody but its user writes what it makes.

    Where a stream was closed before the start, the next file or connection takes its number, and gets what is written
    to it; libraries end on there being none. SGLang's processes take what comes through their sockets for their own.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                while os.open(os.devnull, os.O_RDWR) < number:
                    pass
                os.set_inheritable(number, True)
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115
    os.umask(os.umask(0) | 0o022)
    lose_lines_quietly()


def lose_lines_quietly() -> None:
    """In a process that serves: what a log cannot write is lost, and told of once.

    Who read it may be gone (`serve | head`), or the disk full. Python writes a traceback for every line then.
    """
    handle = logging.Handler.handleError
    told: list[OSError] = []

    def lose(self: logging.Handler, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            handle(self, record)
        elif not told:
            told.append(error)
            with contextlib.suppress(OSError):
                sys.stderr.write(f"lines of a log cannot be written and are lost: {error.strerror}\n")

    logging.Handler.handleError = lose  # type: ignore[method-assign]


def allow_files() -> int:
    """Let this process and its children open as many files as may be had, 65,535 at most; returns how many those are.

    A shell gives 1,024 mostly, and every connection is one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def room_for_threads(wanted: int) -> int:
    """How many threads of `wanted` this process can start now, by starting them; it may have all that it may have.

    The kernel counts processes and threads alike, those of the same user elsewhere too, and spares root.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    over, started = threading.Event(), list[threading.Thread]()
    with contextlib.suppress(RuntimeError):
        while len(started) < wanted:
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    over.set()
    for thread in started:
        thread.join()
    return len(started)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """In a child on Linux: have the kernel send signal `number` to this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def bound(code: str) -> str:
    """Python `code` for a child that this thread starts: before anything else it does `die_with_parent`.

    At once if the parent was gone before. A signal that is set in the first line lasts, whatever is imported behind it.
    """
    first = f"import ctypes, os; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})"
    return f"{first}; os.getppid() == {os.getpid()} or os._exit(1); {code}"


def announce_parent() -> None:
    """In a process about to spawn children: tell them, through the environment, whose children they are."""
    os.environ[_PARENT_KEY] = str(os.getpid())


def die_with_announced_parent() -> None:
    """In a spawned child: `die_with_parent`, at once if the parent was gone before this line; announces itself in turn.

    Python tells a spawned child its parent only after it has imported the main module, which is where this is called.
    """
    die_with_parent()
    if os.environ.get(_PARENT_KEY) != str(os.getppid()):
        os._exit(1)
    announce_parent()


_USUAL = gc.get_threshold()
_RARE = (50_021, *_USUAL[1:])  # no number that anybody would choose


def collect_rarely() -> None:
    """For thousands of imports: modules are no garbage, and looking at them again takes a fifth of the time."""
    gc.set_threshold(*_RARE)


def collect_as_usual() -> None:
    """After the imports, before anything is served; what somebody else has set since (`--gc-threshold`) stays."""
    if gc.get_threshold() == _RARE:
        gc.set_threshold(*_USUAL)


def free_port() -> int:
    """A port that nothing uses right now, below those that Linux gives to outgoing connections.

    A server binds it seconds later, after its imports: one that the kernel hands out might be taken by then.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
