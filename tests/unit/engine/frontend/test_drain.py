"""A stop in a pause, with a manager that stands for SGLang's."""

import asyncio
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from sglang_hybrid.engine.frontend.server import drain, looks
from sglang_hybrid.engine.launch import server_name
from sglang_hybrid.engine.processes import stop
from sglang_hybrid.engine.surface.hooks import HOOKS
from sglang_hybrid.routing.looks import ALIVE, ENDING, SERVER
from tests.versions import since


class Manager:
    """Told to stop after the first look; `stuck` never lets anybody go on."""

    def __init__(self, paused: bool, stuck: bool = False) -> None:
        self.is_pause, self._stuck = paused, stuck
        self.said: list[str] = []
        self.looks = 0

    @property
    def gracefully_exit(self) -> bool:
        self.looks += 1
        return self.looks > 2

    async def continue_generation(self, message: Any) -> None:
        assert type(message).__name__ == "ContinueGenerationReqInput"
        self.said.append("goes on")
        if self._stuck:
            await asyncio.sleep(3600)
        self.is_pause = False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_S", 0.001)
    monkeypatch.setattr(drain, "PATIENCE_S", 0.05)
    monkeypatch.setattr(looks, "ending", threading.Event())


def test_one_of_several_http_processes_does_not_end_the_scheduler_under_the_others() -> None:
    from sglang.srt.managers.io_struct import AbortReq, ShutdownReq
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    class Worker(Manager, TokenizerWorker):
        def _dispatch_to_scheduler(self, message: Any) -> None:
            self.said.append(type(message).__name__)

    async def ends(manager: Any) -> None:
        for message in (AbortReq(rid="a"), ShutdownReq()):
            manager._dispatch_to_scheduler(message)

    worker = Worker(paused=False)
    asyncio.run(drain.drain(ends, worker))
    assert worker.said == ["AbortReq"]


@since("0.5.21", "a worker that leaves its event loop")
def test_a_worker_ends_as_uvicorn_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's leaves the event loop by an exception, and uvicorn logs a traceback with every stop."""
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    class Worker(Manager, TokenizerWorker):
        def _dispatch_to_scheduler(self, message: Any) -> None:
            raise AssertionError(message)

    async def ends(manager: Any) -> None:
        assert not server.should_exit
        manager._server_stop_hook()

    monkeypatch.setattr(drain, "_servers", [])
    server = SimpleNamespace(should_exit=False)
    drain.serve(server)
    asyncio.run(drain.drain(ends, Worker(paused=False)))
    assert server.should_exit


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\na"]
)
def test_a_client_that_neither_reads_nor_sends_does_not_keep_a_server(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """uvicorn waits for its connections without end; the client here fetches nothing of 20 MB."""
    busy = asyncio.Event()

    async def app(_: Any, receive: Any, send: Any) -> None:
        busy.set()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200})
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"a" * 100_000, "more_body": True})

    async def stops(server: uvicorn.Server) -> None:
        await busy.wait()

        async def ends(_: Any) -> None:
            server.should_exit = True

        await drain.drain(ends, Manager(paused=False))

    async def serves() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
        monkeypatch.setattr(drain, "_servers", [server])
        with socket.create_connection(listening.getsockname()) as client:
            client.sendall(sent)
            await asyncio.gather(server._serve([listening]), stops(server))

    monkeypatch.setattr(drain, "DELIVER_S", 0.05)
    asyncio.run(asyncio.wait_for(serves(), 20))


def test_the_end_of_a_server_does_not_wait_for_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, answered = threading.Event(), threading.Event()
    monkeypatch.setattr(drain, "_closed", closed)
    waiting = threading.Thread(target=drain.warm_up, args=(answered.wait,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    drain.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert not answered.is_set()
    monkeypatch.setattr(drain, "_closed", threading.Event())
    done: list[str] = []
    drain.warm_up(done.append, "it is waited for as long as the server is open")
    assert len(done) == 1


@pytest.mark.parametrize(
    ("manager", "said"),
    [
        (Manager(paused=False), ["waits for requests"]),
        (Manager(paused=True), ["goes on", "waits for requests"]),
        (Manager(paused=True, stuck=True), ["goes on", "waits for requests"]),
    ],
)
def test_a_pause_ends_before_the_requests_are_waited_for(manager: Manager, said: list[str]) -> None:
    async def waits(given: Manager) -> SimpleNamespace:
        given.said.append("waits for requests")
        return SimpleNamespace(done=True, asked=stop.asked.get())

    ended = asyncio.run(drain.drain(waits, manager))
    assert ended.done
    assert ended.asked
    assert not stop.asked.get(), "what ends a server otherwise was not asked for"
    assert manager.said == said
    assert manager.looks == 3, "nothing happens before the signal"


@pytest.mark.parametrize("kind", ["tokenizer_manager:TokenizerManager", "multi_tokenizer_mixin:TokenizerWorker"])
def test_a_pause_is_seen_to_in_one_http_process_and_in_several(kind: str) -> None:
    """SGLang's worker has a pause of its own, which does not call the manager's."""
    rows = {hook.target for hook in HOOKS if hook.function == "frontend.server.drain:pause"}
    assert f"srt.managers.{kind}.pause_generation" in rows


@pytest.mark.parametrize(
    ("paused", "mode", "asked"),
    [
        (True, "abort", ["retract", "abort"]),
        (False, "abort", ["abort"]),
        (True, "in_place", ["in_place"]),
    ],
)
def test_who_is_paused_in_the_middle_is_retracted_before_it_is_aborted(
    paused: bool, mode: str, asked: list[str]
) -> None:
    modes: list[str] = []

    async def original(_: Manager, message: Any) -> None:
        modes.append(message.mode)

    asyncio.run(drain.pause(original, Manager(paused), SimpleNamespace(mode=mode)))
    assert modes == asked


def test_routers_are_told_which_server_it_is_and_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def headers(path: str, kind: str = "http") -> dict[str, str] | None:
        """What goes out behind a page that has one header; None where the hook leaves the call alone."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        changed = looks.tell("app", {"type": kind, "path": path}, "receive", send)
        if changed is None:
            return None
        (app, scope, receive, with_more), named = changed
        assert (app, scope["path"], receive, named) == ("app", path, "receive", {})
        asyncio.run(with_more({"type": "http.response.start", "headers": [(b"a", b"b")]}))
        asyncio.run(with_more({"type": "http.response.body", "body": b"c"}))
        assert sent[1] == {"type": "http.response.body", "body": b"c"}
        return {name.decode(): value.decode() for name, value in sent[0]["headers"]}

    monkeypatch.delenv(server_name.ENVIRONMENT_KEY, raising=False)
    assert headers(ALIVE) == {"a": "b"}, "SGLang's own launcher gives no name"
    names = set()
    for _ in range(3):
        monkeypatch.setenv(server_name.ENVIRONMENT_KEY, "before")
        server_name.leave()
        told = headers("/server_info")
        assert told is not None
        names.add(told[SERVER.lower()])
    assert len(names - {"before"}) == 3
    assert headers("/generate") is None
    assert headers(ALIVE, "lifespan") is None

    async def done(_: Any) -> None:
        return None

    asyncio.run(drain.drain(done, Manager(paused=False)))
    told = headers(ALIVE)
    assert told is not None
    assert told[ENDING.lower()] == "1"
