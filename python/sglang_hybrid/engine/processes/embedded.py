"""Engines inside somebody's own process (`sglang_hybrid.Engine`): the process is theirs, and outlives its engine.

SGLang's was made for a server. When a child of it dies it kills its own process, a notebook or a batch job, or waits
for ever. It takes SIGTERM over, and hears it during a call only, which then ends the process with status 0. Ctrl-C
reaches its schedulers too. And `shutdown` kills every child of the process, whoever started it. Here calls raise
EngineDied, and all else is the user's.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from sglang_hybrid.core.errors import ConfigError, EngineDied
from sglang_hybrid.engine.launch import flags
from sglang_hybrid.engine.processes import leftovers, replicas, stop
from sglang_hybrid.engine.processes.interrupts import Interruptible

_GONE_S, _LOOK_S = 10.0, 0.05
"""For processes that were killed to be gone, and their memory with them; between two looks."""

_engines: list[Embedded] = []
_starting = 0
_ending = False


def start(kind: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """`kind(**arguments)`, SGLang's engine, and what keeps its end from this process.

    Raises EngineDied where a process of it dies before it is ready, and whatever `kind` raises.
    """
    global _starting
    if _owns not in stop.spared:
        stop.spared.append(_owns)
    before = set(_children())
    _starting += 1
    try:
        with stop.held_back_in_spawned(), _quit_signal(arguments.get("custom_sigquit_handler")):
            engine = kind(**arguments)
    except BaseException:
        _kill([child for child in _children() if child not in before])
        if not _engines:
            leftovers.remove()
        raise
    finally:
        _starting -= 1
    known = Embedded(engine, [child for child in _children() if child not in before])
    _engines.append(known)
    if getattr(engine, "loop", None) is not None:
        engine.loop = Interruptible(engine.loop)
    if getattr(engine, "send_to_rpc", None) is not None:
        copies = flags.replicas(arguments.get("dp_size"), arguments.get("enable_dp_attention"))
        engine.send_to_rpc = _Asked(engine.send_to_rpc, known, copies)
    return engine


def of(manager: Any) -> Embedded | None:
    """The engine of this process whose TokenizerManager, or whose part of it, is `manager`; None in a server."""
    return next((engine for engine in _engines if engine.has(manager)), None)


class Embedded:
    """One engine, its `children`, and who waits for it; `why` says why it is no more."""

    def __init__(self, engine: Any, children: list[Any]) -> None:
        self.engine, self.manager = engine, engine.tokenizer_manager
        self.why = ""
        parts = [] if self.manager is None else vars(self.manager).values()
        self._parts = [self.manager, *(part for part in parts if type(part).__name__ == "FanOutCommunicator")]
        self._children = children
        self._pid = os.getpid()
        self._waiting: set[asyncio.Timeout] = set()
        self._once = threading.RLock()  # a signal may come while the same thread holds it

    def has(self, part: Any) -> bool:
        return any(known is part for known in self._parts)

    @property
    def watchdog(self) -> Any:
        """SGLang's, which looks at its processes once a second."""
        return getattr(self.manager, "_subprocess_watchdog", None)

    @property
    def here(self) -> bool:
        """Whether this process started it, and is not a copy of that."""
        return self._pid == os.getpid()

    def require(self) -> None:
        """Raise EngineDied if it is no more, RuntimeError in a copy of its process."""
        if not self.here:
            raise RuntimeError(
                "an engine answers in the process that started it, not in one forked from that: make an Engine there, "
                f"or ask from process {self._pid}"
            )
        if self.why:
            with self._once:  # nothing of it is left then
                raise EngineDied(self.why)

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Raises EngineDied, at the start or as soon as the engine is no more."""
        self.require()
        try:
            async with asyncio.timeout(None) as deadline:
                self._waiting.add(deadline)
                try:
                    yield
                finally:
                    self._waiting.discard(deadline)
        except TimeoutError:
            self.require()
            raise

    async def answers(self, answers: Any) -> AsyncIterator[Any]:
        """`answers`, an asynchronous generator, as long as it is alive."""
        async with aclosing(answers):
            while True:
                async with self.alive():
                    try:
                        answer = await anext(answers)
                    except StopAsyncIteration:
                        return
                yield answer

    def end(self, why: str) -> None:
        """Kill what is left of it, and let every call of now and later raise EngineDied; from any thread."""
        with self._once:
            if self.why or not self.here:
                return
            self.why = why
            _kill(self._children)
            if all(engine.why for engine in _engines):
                leftovers.remove()
            loop = getattr(self.manager, "event_loop", None)
            with suppress(AttributeError, RuntimeError):  # nothing was asked yet; nobody waits in a closed loop
                loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        now = asyncio.get_running_loop().time()
        for deadline in self._waiting:
            if not deadline.expired():
                deadline.reschedule(now)
        futures = [*self.manager.session_futures.values(), self.manager.model_update_result]
        for future in futures:
            if future is not None and not future.done():
                future.set_exception(EngineDied(self.why))


class _Asked:
    """The socket of an engine's `collective_rpc`, which would wait for ever on a scheduler that is gone."""

    def __init__(self, socket: Any, engine: Embedded, copies: int) -> None:
        self._socket, self._engine, self._copies = socket, engine, copies
        socket.RCVTIMEO = socket.SNDTIMEO = int(1000 * _LOOK_S)

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._socket, name)
        return called if name == "close" else partial(self._ask, called)

    def _ask(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        import zmq  # of SGLang's packages

        if self._copies > 1:  # each listens where nobody asks
            self._engine.require()
            raise ConfigError(
                f"collective_rpc reaches no scheduler of several replicas; make an Engine of one: {self._copies}"
            )
        while True:
            self._engine.require()
            with suppress(zmq.Again):
                return call(*arguments, **named)


def check(original: Callable[..., bool], watchdog: Any) -> bool:
    """AROUND hook of SubprocessWatchdog._check_processes, which would send SIGQUIT to the process that it runs in.

    Here a process that ended is none, with status 0 too: so ends a scheduler that raised an error.
    """
    engine = next((each for each in _engines if each.watchdog is watchdog), None)
    if engine is None:
        return False if _starting or stop.over.is_set() else original(watchdog)
    if all(process.is_alive() for process in watchdog._processes):
        return False
    engine.end(f"a process of the engine died, and it has ended; make another. {stop.cause(watchdog)}")
    return True


def keep_signals(original: Callable[..., None], manager: Any) -> None:
    """AROUND hook of TokenizerManager.auto_create_handle_loop, which every call begins with: signals stay the user's.

    Of one that comes between two calls, its loop would hear with the next signal only.
    """
    engine = of(manager)
    if engine is None:
        return original(manager)
    engine.require()
    first = manager.event_loop is None and threading.current_thread() is threading.main_thread()
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)} if first else {}
    original(manager)
    for number, handler in kept.items():
        manager.event_loop.remove_signal_handler(number)
        if handler is not None:
            signal.signal(number, handler)
    return None


def hear(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of TokenizerManager._wait_one_response: what nobody waits for any more is not computed to its end.

    A server hears that a client hangs up. Of a task that is cancelled, or a stream that is left, SGLang's engine hears
    nothing: the request ran on to its last token, in a row that others waited for.
    """
    answers, engine = original(manager, obj, *args, **kwargs), of(manager)
    return answers if engine is None else _heard(engine, obj.rid, manager.rid_to_state.get(obj.rid), answers)


async def _heard(engine: Embedded, rid: str, state: Any, answers: Any) -> AsyncIterator[Any]:
    try:
        async with aclosing(answers):
            async for answer in answers:
                yield answer
    except (asyncio.CancelledError, GeneratorExit):
        if not engine.why and state is not None and engine.manager.rid_to_state.get(rid) is state:  # it is not over
            engine.manager.abort_request(rid)
        raise


def shutdown(original: Callable[..., None], engine: Any) -> None:
    """AROUND hook of Engine.shutdown, which kills all children of this process: its own end, and later calls raise."""
    global _ending
    known = next((each for each in _engines if each.engine is engine), None)
    if known is None:
        return original(engine)
    if not known.here:  # a copy of its process ends
        return None
    if known.watchdog is not None:
        known.watchdog.stop()
    known.end("the engine was shut down; make another")
    _ending, asked = True, getattr(engine, "send_to_rpc", None)
    try:
        return original(engine)
    finally:
        _ending = False
        engine.send_to_rpc = asked  # SGLang drops it, and a later call would say that None has no `send`


def _owns(include_parent: bool) -> bool:
    """Whether what SGLang is about to kill, its process or all children of it, is not its own.

    Raises EngineDied in place of the end of the process.
    """
    if include_parent and (_engines or _starting):
        why = "a process of the engine died, and it has ended; make another. Its own message stands above."
        for engine in _engines:
            engine.end(why)
        raise EngineDied(why)
    return _ending


@contextmanager
def _quit_signal(custom: Any) -> Iterator[None]:
    """SGLang's children send SIGQUIT when they raise an error or hang: from its end on it ends the engines.

    Inside, SGLang's own handler raises EngineDied, see `_owns`. A handler that the user gave, `custom`, stays. A thread
    can set none, and without one the process would end: there the signal is ignored, and the watchdog sees who dies.
    """
    if threading.current_thread() is not threading.main_thread():
        if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(1))  # SIG_IGN
        yield
        return
    before = signal.getsignal(signal.SIGQUIT)
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL if before is None else before)
        raise
    if custom is None:
        signal.signal(signal.SIGQUIT, _quit)


def _quit(*_: Any) -> None:
    for engine in _engines:
        engine.end("a process of the engine gave it up, and it has ended; make another. Its own message stands above.")


def _children() -> list[Any]:
    """Those of this process; the resource tracker is not an engine's alone."""
    import psutil  # of SGLang's packages

    tracker = getattr(getattr(resource_tracker.ensure_running, "__self__", None), "_pid", None)
    return [child for child in psutil.Process().children() if child.pid != tracker]


def _kill(children: list[Any]) -> None:
    """Kill these and what is below them, and wait until they are gone."""
    import psutil

    family = list(children)
    for child in children:
        with suppress(psutil.Error):
            family += child.children(recursive=True)
    for each in family:
        with suppress(psutil.Error):
            each.kill()
    deadline = time.monotonic() + _GONE_S
    while any(map(replicas.lives, family)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    multiprocessing.active_children()  # or those that ended stay zombies
