"""An engine in somebody's own process: its end is an exception, and nothing of the user's goes with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import zmq

from sglang_hybrid import EngineDied
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.processes import embedded, stop
from sglang_hybrid.engine.processes.interrupts import Interruptible
from tests.engine.support import PATIENCE_S, eventually

SLEEP = ["sleep", "3600"]


class FanOutCommunicator:
    """As SGLang's are found: by this name, among the attributes of a manager."""


class Manager:
    def __init__(self, processes: list[Any]) -> None:
        self._subprocess_watchdog = SimpleNamespace(
            _names=["scheduler_0"][: len(processes)], _processes=processes, stop=lambda: None
        )
        self.flush = FanOutCommunicator()
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.session_futures: dict[str, asyncio.Future[Any]] = {}
        self.model_update_result: asyncio.Future[Any] | None = None


class Process:
    """A child, as `multiprocessing` tells of it."""

    made: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self) -> None:
        self.child = subprocess.Popen(SLEEP)
        self.made.append(self.child)

    @property
    def exitcode(self) -> int | None:
        return self.child.poll()

    def is_alive(self) -> bool:
        return self.child.poll() is None


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(embedded, "_engines", [])
    monkeypatch.setattr(stop, "spared", [])
    monkeypatch.setattr(embedded.leftovers, "_mine", [])
    before = signal.getsignal(signal.SIGQUIT)
    yield
    signal.signal(signal.SIGQUIT, before)
    while Process.made:
        child = Process.made.pop()
        child.kill()
        child.wait()


@contextmanager
def a_child_of_the_user() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(SLEEP)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def started() -> tuple[Any, Manager, Process]:
    found: list[Process] = []

    def kind() -> Any:
        found.append(Process())
        return SimpleNamespace(tokenizer_manager=Manager(list(found)))

    engine = embedded.start(kind, {})
    return engine, engine.tokenizer_manager, found[0]


def signals(_: Any) -> bool:
    raise AssertionError("SGLang would send SIGQUIT to the process")


def wait_for(manager: Manager, wait: Callable[[], Any]) -> None:
    """`wait` in the manager's loop, while its process is killed and the watchdog looks."""

    async def call() -> None:
        manager.event_loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        assert not embedded.check(signals, manager._subprocess_watchdog)
        process = manager._subprocess_watchdog._processes[0]
        process.child.kill()
        process.child.wait()
        assert await asyncio.to_thread(embedded.check, signals, manager._subprocess_watchdog)
        await asyncio.wait_for(waiting, PATIENCE_S)

    asyncio.run(call())


async def answers() -> Any:
    yield "first"
    await asyncio.Event().wait()


def test_a_call_that_waits_raises_when_a_process_is_killed() -> None:
    _, manager, _ = started()
    heard = []

    async def generate() -> None:
        async for answer in embedded.of(manager).answers(answers()):
            heard.append(answer)

    with a_child_of_the_user() as other:
        with pytest.raises(EngineDied, match="operating system killed scheduler_0"):
            wait_for(manager, generate)
        assert other.poll() is None
    assert heard == ["first"]
    with pytest.raises(EngineDied, match="make another"):
        embedded.keep_signals(lambda _: None, manager)


def test_whatever_else_waits_for_it_raises() -> None:
    _, manager, _ = started()

    async def flush() -> None:
        async with embedded.of(manager.flush).alive():
            await asyncio.Event().wait()

    async def everything() -> list[Any]:
        loop = asyncio.get_running_loop()
        manager.model_update_result = loop.create_future()
        manager.session_futures["a"] = loop.create_future()
        waiting = (flush(), manager.model_update_result, manager.session_futures["a"])
        return await asyncio.gather(*waiting, return_exceptions=True)

    found: list[Any] = []

    async def kept() -> None:
        found.extend(await everything())

    wait_for(manager, kept)
    assert [type(each) for each in found] == [EngineDied] * 3


def test_a_scheduler_that_raises_an_error_ends_with_status_0_and_counts() -> None:
    _, manager, process = started()
    process.child.kill()
    process.child.wait()
    process.child.returncode = 0
    assert embedded.check(signals, manager._subprocess_watchdog)
    with pytest.raises(EngineDied, match="Its own message stands above"):
        embedded.of(manager).require()


def test_a_server_is_looked_after_by_sglang() -> None:
    assert embedded.check(lambda _: True, object())
    assert embedded.of(None) is None
    asked: list[Any] = []
    assert stop.end_with_status(lambda *arguments, **_: asked.append(arguments), os.getpid(), False) is None
    assert asked


def test_a_server_that_ends_its_processes_reports_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several HTTP processes SGLang's watchdog looks on, and logged that the scheduler had crashed."""
    monkeypatch.setattr(stop, "over", threading.Event())
    stop.over.set()
    assert not embedded.check(lambda _: True, object())


def test_a_start_that_fails_leaves_nothing() -> None:
    made: list[Process] = []

    def kind() -> None:
        made.append(Process())
        raise RuntimeError("Rank 0 scheduler died")

    before = signal.getsignal(signal.SIGQUIT)
    with a_child_of_the_user() as other:
        with pytest.raises(RuntimeError, match="Rank 0"):
            embedded.start(kind, {})
        assert made[0].exitcode == -signal.SIGKILL
        assert other.poll() is None
    assert signal.getsignal(signal.SIGQUIT) is before


def test_a_child_that_complains_during_the_start_ends_it_with_an_error() -> None:
    """SGLang's handler of SIGQUIT kills the process that it runs in."""

    def kind() -> None:
        stop.end_with_status(signals, os.getpid())

    with pytest.raises(EngineDied, match="stands above"):
        embedded.start(kind, {})


def test_a_child_that_complains_later_ends_the_engine() -> None:
    _, manager, process = started()
    os.kill(os.getpid(), signal.SIGQUIT)
    with pytest.raises(EngineDied, match="gave it up"):
        embedded.of(manager).require()
    assert process.exitcode == -signal.SIGKILL


def test_shutdown_takes_its_own_children_alone() -> None:
    engine, manager, process = started()
    killed: list[Any] = []

    def of_sglang(_: Any) -> None:
        stop.end_with_status(lambda *arguments, **_: killed.append(arguments), os.getpid(), False)

    with a_child_of_the_user() as other:
        embedded.shutdown(of_sglang, engine)
        assert killed == []
        assert process.exitcode == -signal.SIGKILL
        assert other.poll() is None
    with pytest.raises(EngineDied, match="was shut down"):
        embedded.of(manager).require()


def test_an_engine_that_came_later_survives_the_end_of_an_earlier_one() -> None:
    first, _, _ = started()
    second, manager, process = started()
    embedded.shutdown(lambda _: None, first)
    embedded.of(manager).require()
    assert process.is_alive()
    embedded.shutdown(lambda _: None, second)


def asked(engine: Any) -> bytes:
    """As SGLang's `collective_rpc` asks a scheduler."""
    engine.send_to_rpc.send(b"save")
    return bytes(engine.send_to_rpc.recv())


def test_a_call_of_a_scheduler_raises_when_it_dies() -> None:
    """SGLang waits in it for ever, in the caller's thread and with no event loop."""
    context = zmq.Context()
    rank, address = context.socket(zmq.DEALER), "inproc://rank"
    rank.bind(address)

    def kind() -> Any:
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        return SimpleNamespace(tokenizer_manager=Manager([Process()]), send_to_rpc=socket)

    engine = embedded.start(kind, {})
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    try:
        rank.send(b"saved")
        assert asked(engine) == b"saved"
        watchdog._processes[0].child.kill()
        watchdog._processes[0].child.wait()
        threading.Timer(0.2, embedded.check, (signals, watchdog)).start()
        with pytest.raises(EngineDied, match="operating system killed scheduler_0"):
            asked(engine)

        def of_sglang(engine: Any) -> None:
            engine.send_to_rpc.close(linger=0)
            engine.send_to_rpc = None

        embedded.shutdown(of_sglang, engine)
        with pytest.raises(EngineDied):
            asked(engine)
    finally:
        context.destroy(linger=0)


def test_a_call_that_reaches_no_scheduler_of_several_is_refused() -> None:
    """Each replica has a socket of its own for such calls, and SGLang's engine asks at another, for ever."""
    context = zmq.Context()

    def kind(dp_size: int) -> Any:
        return SimpleNamespace(tokenizer_manager=Manager([Process()]), send_to_rpc=context.socket(zmq.DEALER))

    engine = embedded.start(kind, {"dp_size": 2})
    try:
        with pytest.raises(ConfigError, match="make an Engine of one: 2"):
            asked(engine)
    finally:
        embedded.shutdown(lambda _: None, engine)
        context.destroy(linger=0)


def test_a_forked_copy_neither_asks_it_nor_ends_it() -> None:
    engine, manager, process = started()
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError, match="not in one forked"):
            embedded.keep_signals(lambda _: None, manager)
        embedded.shutdown(signals, engine)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert process.is_alive()
    embedded.shutdown(lambda _: None, engine)


def test_sigterm_stays_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's handler is its loop's, which hears nothing between two calls."""
    engine, manager, _ = started()
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:

        async def call() -> None:
            def of_sglang(manager: Any) -> None:
                manager.event_loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGQUIT):
                    manager.event_loop.add_signal_handler(number, signals, None)

            embedded.keep_signals(of_sglang, manager)

        asyncio.run(call())
        os.kill(os.getpid(), signal.SIGTERM)
        assert eventually(lambda: heard == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)
        embedded.shutdown(lambda _: None, engine)


def test_ctrl_c_ends_a_call_alone() -> None:
    asked = asyncio.new_event_loop()
    engine = embedded.start(lambda: SimpleNamespace(tokenizer_manager=Manager([]), loop=asked), {})
    try:
        assert isinstance(engine.loop, Interruptible)
        assert engine.loop.is_closed() is False
    finally:
        embedded.shutdown(lambda _: None, engine)
        asked.close()
