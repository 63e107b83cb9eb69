"""How a server stops: the first process decides, and takes the others with it.

systemd, `timeout` and Ctrl-C send their signal to every process of the group. A scheduler that ends by itself looks
like a crash to SGLang: it reports one, and kills the server instead of letting it finish its requests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell gives it."""

_missed: list[int] = []


def leave_to_parent() -> None:
    """In a spawned child: outlive signals to the group. The child ends when its parent does, or kills it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _missed.append(number))


def repeat_missed() -> None:
    """In a child that has handlers of its own by now: let them see a signal that came before them.

    uvicorn stops its workers by SIGTERM and waits for them, and one may still be importing.
    """
    while _missed:
        signal.raise_signal(_missed.pop())


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """While it lasts, Ctrl-C ends this process and its children at once, with INTERRUPTED and without a traceback.

    An exception would be reported by whatever it interrupts, and may be lost there. Requests that run are another
    matter: uvicorn has taken the signal over by then, finishes them, and repeats it.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # SGLang's watchdog would report the children that end here
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(INTERRUPTED)
