"""Ctrl-C in a call of an engine (`sglang_hybrid.Engine`): it ends that call, and nothing else.

Python raises KeyboardInterrupt in whatever the event loop runs just then. That may be what takes the answers of all
calls: later ones would wait for ever. And of a call that was left so, nothing was cancelled: its requests, a batch of
thousands say, were computed to their last token, before those of the next call.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Awaitable
from types import FrameType
from typing import Any


class Interruptible:
    """The event loop of an engine, as far as it asks for it.

    Where Ctrl-C is not Python's own (a handler of the user's), and in other threads, which it does not reach, calls are
    run as they were.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def run_until_complete(self, call: Awaitable[Any]) -> Any:
        """What `call` returns; raises KeyboardInterrupt after Ctrl-C, once what it asked for is aborted.

        Answers are steps of generators. Anything else goes on with the next call: SGLang would take the answer to an
        update of weights that was cancelled for that of the next. A second Ctrl-C is Python's.
        """
        is_mine = threading.current_thread() is threading.main_thread()
        if not is_mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return self._loop.run_until_complete(call)
        task = asyncio.ensure_future(call, loop=self._loop)
        waited = asyncio.shield(task) if inspect.iscoroutine(call) else task
        was_interrupted = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal was_interrupted
            signal.signal(signal.SIGINT, signal.default_int_handler)
            was_interrupted = True
            self._loop.call_soon_threadsafe(waited.cancel)

        signal.signal(signal.SIGINT, interrupt)
        try:
            answer = self._loop.run_until_complete(waited)
        except asyncio.CancelledError:
            if not was_interrupted:
                raise
        except RuntimeError:  # it is running already: nothing is asked
            task.cancel()
            raise
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if was_interrupted:
            raise KeyboardInterrupt
        return answer
