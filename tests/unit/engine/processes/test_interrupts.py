"""Ctrl-C in a call of an engine: the call ends, and what serves the next one goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.processes.interrupts import Interruptible


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Server:
    """A loop whose task, as SGLang's, hands out all answers; and what was asked and given up."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = Interruptible(self.loop)
        self.given_up: list[str] = []
        self.presses = 0
        self.asked: list[asyncio.Future[str]] = []
        self.taker = self.loop.create_task(self._take())

    async def _take(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.presses:  # Ctrl-C just here
                self.presses -= 1
                ctrl_c()
            elif self.asked:
                self.asked.pop().set_result("answer")

    async def wait(self) -> str:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def generate(self, name: str) -> AsyncIterator[str]:
        try:
            yield await self.wait() if name == "short" else await asyncio.sleep(3600, "never")
        except asyncio.CancelledError:
            self.given_up.append(name)
            raise


@pytest.fixture
def server() -> Iterator[Server]:
    made, before = Server(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield made
    signal.signal(signal.SIGINT, before)
    left = asyncio.all_tasks(made.loop)
    for task in left:
        task.cancel()
    made.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    made.loop.close()


def test_the_request_is_given_up_and_the_next_is_answered(server: Server) -> None:
    for _ in range(3):
        server.presses = 1
        with pytest.raises(KeyboardInterrupt):
            server.engine.run_until_complete(server.generate("long").__anext__())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert server.engine.run_until_complete(server.generate("short").__anext__()) == "answer"
    assert server.given_up == ["long"] * 3
    assert not server.taker.done()


def test_what_is_no_request_goes_on_with_the_next_call(server: Server) -> None:
    over, told = asyncio.Event(), []

    async def update() -> None:
        await over.wait()
        told.append("new weights")

    server.presses = 1
    with pytest.raises(KeyboardInterrupt):
        server.engine.run_until_complete(update())
    over.set()
    assert server.engine.run_until_complete(server.generate("short").__anext__()) == "answer"
    assert told == ["new weights"]


def test_an_answer_that_came_meanwhile_is_no_reason_to_go_on(server: Server) -> None:
    """A script that asks in a loop ends."""

    async def answer() -> AsyncIterator[str]:
        ctrl_c()
        yield "answer"

    with pytest.raises(KeyboardInterrupt):
        server.engine.run_until_complete(answer().__anext__())


def test_a_second_time_is_pythons(server: Server) -> None:
    async def stubborn() -> AsyncIterator[str]:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                server.loop.call_soon(ctrl_c)
                yield await asyncio.sleep(3600, "never")

    server.presses = 1
    with pytest.raises(KeyboardInterrupt):
        server.engine.run_until_complete(stubborn().__anext__())


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_handler_of_the_users_stays(server: Server, handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    server.presses = 1
    assert server.engine.run_until_complete(server.generate("short").__anext__()) == "answer"
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_and_errors_are_as_they_were(server: Server) -> None:
    async def wrong() -> AsyncIterator[str]:
        raise ValueError("wrong")
        yield ""

    async def cancelled() -> AsyncIterator[str]:
        raise asyncio.CancelledError
        yield ""

    with pytest.raises(ValueError, match="wrong"):
        server.engine.run_until_complete(wrong().__anext__())
    with pytest.raises(asyncio.CancelledError):
        server.engine.run_until_complete(cancelled().__anext__())
    found: list[str] = []
    asked = SimpleNamespace(run=lambda: server.engine.run_until_complete(server.generate("short").__anext__()))
    thread = threading.Thread(target=lambda: found.append(asked.run()))
    thread.start()
    thread.join(60)
    assert found == ["answer"]
    assert server.engine.is_running() is False


def test_in_a_loop_that_runs_nothing_is_asked(server: Server) -> None:
    """As in a notebook: the error is Python's, and no request goes on without anybody to hear of it."""

    async def cell() -> None:
        call = server.generate("short").__anext__()
        with pytest.raises(RuntimeError, match="already running"):
            server.engine.run_until_complete(call)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    server.loop.run_until_complete(cell())
    assert server.asked == []
    assert asyncio.all_tasks(server.loop) == {server.taker}
