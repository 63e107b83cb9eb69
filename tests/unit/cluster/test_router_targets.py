"""What one client sends is nobody else's trouble: odd targets, cookies, deep bodies, calls that go to all workers."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_hybrid.cluster import route, router
from sglang_hybrid.cluster import workers as workers_module
from sglang_hybrid.cluster.answers import Answers
from tests.unit.cluster.fake import FakeWorker, cluster, until
from tests.unit.cluster.test_pairs import decode, prefill

PATIENCE_S = 60.0
"""For what must not hang."""


async def status_of(url: str, target: bytes, method: bytes = b"GET") -> int:
    """Of a request whose target goes out as it is."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(method + b" " + target + b" HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/v1/models", 400),
        (b"http://x/flush_cache", 400),
        (b"@127.0.0.1:1/v1/models", 400),
        (b":1@127.0.0.1:1/v1/models", 400),
        (b"\\\\x/v1/models", 400),
        (b"*", 400),
        (b"/v1/models?q=\xff", 400),
        (b"//x/v1/models", 404),
        (b"/\\x/v1/models", 404),
        (b"/@x/v1/models", 404),
        (b"/v1/models?q=%zz&x=http://y@z/%20+a", 200),
        (b"/v1/models?/@x/", 200),
    ],
)
def test_a_target_is_the_trouble_of_its_request_alone(pairs: bool, target: bytes, status: int) -> None:
    async def run() -> None:
        one, two = (prefill(), decode()) if pairs else (FakeWorker(), FakeWorker())
        async with cluster(one, two, prefills=int(pairs)) as (url, _, workers):
            assert await status_of(url, target) == status
            assert [worker.why for worker in workers.all.values()] == ["", ""]
            if status == 200:
                assert target.decode() in one.looks + two.looks, "it arrives as it was sent"

    asyncio.run(run())


@pytest.mark.parametrize("pairs", [False, True])
def test_an_address_that_cannot_be_is_not_the_workers_fault(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any) -> Any:
        raise aiohttp.InvalidURL("http://127.0.0.1:30000http://x")

    async def run() -> None:
        one, two = (prefill(), decode()) if pairs else (FakeWorker(), FakeWorker())
        async with cluster(one, two, prefills=int(pairs)) as (url, client, workers):
            monkeypatch.setattr(Answers, "ask", ask)
            async with client.post(url + "/generate", json={"text": "a"}) as answer:
                assert answer.status == 400
            assert [worker.why for worker in workers.all.values()] == ["", ""]

    asyncio.run(run())


def test_a_cookie_stays_with_its_client() -> None:
    async def run() -> None:
        seen: list[str | None] = []

        async def answer(request: web.Request) -> web.Response:
            seen.append(request.headers.get("Cookie"))
            said = web.Response()
            said.set_cookie("who", "alice")
            return said

        app = web.Application()
        app.router.add_get("/", answer)
        server = TestServer(app)
        await server.start_server()
        url = f"http://localhost:{server.port}/"  # no jar keeps those of numbers
        async with route.http_session() as session:
            for headers in ({}, {}, {"Cookie": "who=bob"}):
                async with session.get(url, headers=headers) as said:
                    assert said.status == 200
        assert seen == [None, None, "who=bob"]
        await server.close()

    asyncio.run(run())


def test_a_call_to_all_does_not_wait_for_one_that_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)
    monkeypatch.setattr(router, "TRY_S", 0.05)
    monkeypatch.setattr(router, "EVERYWHERE_S", 1000.0)

    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two) as (url, client, workers), asyncio.timeout(PATIENCE_S):
            one.behave = "hang"
            workers.failed(workers.all[one.url], "it was stopped")
            async with client.post(url + "/abort_request", json={"rid": "x"}) as answer:
                assert answer.status == 502
                told = await answer.json()
            assert told[one.url] == "it was stopped"
            assert two.url in told[two.url]
            assert len(one.requests) == len(two.requests) == 1
            one.behave = "answer"
            async with client.post(url + "/abort_request", json={"rid": "x"}) as answer:
                assert answer.status == 200, "it can be out and answer"
            one.release.set()

    asyncio.run(run())


def test_a_call_to_all_ends_with_the_worker_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two) as (url, client, workers), asyncio.timeout(PATIENCE_S):
            one.behave = "hang"
            monkeypatch.setattr(router, "EVERYWHERE_S", 1000.0)
            task = asyncio.create_task(client.post(url + "/flush_cache"))
            await until(lambda: bool(one.requests))
            workers.failed(workers.all[one.url], "it was stopped")
            async with await task as answer:
                assert (answer.status, (await answer.json())[one.url]) == (502, "it was stopped")
            workers.all[one.url].healthy = True
            workers.all[one.url].why = ""
            monkeypatch.setattr(router, "EVERYWHERE_S", 0.05)
            async with client.post(url + "/flush_cache") as answer:
                assert (answer.status, (await answer.json())[one.url]) == (502, "it does not answer")
            task = asyncio.create_task(client.post(url + "/flush_cache?timeout=1000"))
            await until(lambda: len(one.requests) == 3)
            await asyncio.sleep(0.2)
            assert not task.done(), "it waits as long as the request says"
            one.behave = "answer"
            one.release.set()
            assert (await task).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("given", ["", "x", "nan", "-1"])
def test_a_time_that_is_none_is_none(given: str) -> None:
    async def run() -> None:
        async with (
            cluster(FakeWorker()) as (url, client, _),
            client.post(f"{url}/flush_cache?timeout={given}") as answer,
        ):
            assert answer.status == 200

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("field", ["text", "prompt", "input_ids", "messages", "prompt_cache_key"])
def test_a_body_that_is_nested_deep_reaches_a_worker(path: str, field: str) -> None:
    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two) as (url, client, _):
            raw = b'{"%s": %s1%s}' % (field.encode(), b"[" * 1010, b"]" * 1010)
            async with client.post(url + path, data=raw) as answer:
                assert answer.status == 200, "what is wrong with it says the worker"

    asyncio.run(run())
