"""The router before fake workers that fail: who is asked again, who is told, what breaks off."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import aiohappyeyeballs
import aiohttp
import pytest

from sglang_hybrid.cluster import answers
from sglang_hybrid.cluster import workers as workers_module
from sglang_hybrid.cluster.worker import Worker
from tests.unit.cluster.fake import FakeWorker, cluster, until


@pytest.mark.parametrize("how", ["busy", "die", "unreachable"])
def test_a_worker_that_cannot_is_passed_over(how: str) -> None:
    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two, routing="round_robin") as (url, client, workers):
            if how == "unreachable":
                await one.server.close()
            one.behave = how
            for _ in range(4):
                async with client.post(url + "/generate", json={"text": "a"}) as answer:
                    assert (await answer.json())["of"] == two.url
            assert workers.all[two.url].healthy
            if how != "busy":
                await until(lambda: not workers.all[one.url].healthy or how == "die")
            one.behave = two.behave = "busy"
            async with client.post(url + "/generate", json={"text": "a"}) as answer:
                assert answer.status == 503
            assert all(worker.running == 0 for worker in workers.all.values())

    asyncio.run(run())


def test_a_request_that_ends_workers_does_not_end_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        fleet = [FakeWorker() for _ in range(4)]
        for worker in fleet:
            worker.behave = "die"
        async with cluster(*fleet) as (url, client, workers):
            for worker in fleet:
                worker.well = False  # once it is looked at again
            async with client.post(url + "/generate", json={"text": "a"}) as answer:
                assert answer.status == 503
                assert "broke off" in await answer.text()
            assert sum(len(worker.requests) for worker in fleet) == 2
            assert len(workers.healthy) == 2

    asyncio.run(run())


def test_an_answer_that_breaks_off_breaks_off_for_the_client() -> None:
    async def run() -> None:
        one = FakeWorker()
        one.behave = "cut"
        async with cluster(one) as (url, client, _):
            with pytest.raises(aiohttp.ClientError):
                async with client.post(url + "/generate", json={"text": "a"}) as answer:
                    await answer.read()
            assert len(one.requests) == 1, "its beginning is out: nobody else may answer"

    asyncio.run(run())


@pytest.mark.parametrize("head", ["200 O\x07K\r\n", "200 O\0K\r\nX-Said: a\tb\r\n", "200 OK\r\nX-Said: a\t\x07b\r\n"])
def test_control_characters_of_a_worker_cost_nobody_the_answer(head: str) -> None:
    """aiohttp reads them and writes none: the client was answered 500."""

    async def run() -> None:
        one = FakeWorker()
        one.behave = f"HTTP/1.1 {head}Content-Length: 2\r\n\r\n{{}}"
        async with cluster(one) as (url, client, _), client.post(url + "/generate", json={"text": "a"}) as answer:
            assert (answer.status, answer.reason, await answer.json(content_type=None)) == (200, "OK", {})
            assert answer.headers.get("X-Said") == ("a\tb" if "X-Said" in head else None)

    asyncio.run(run())


def test_a_client_that_hangs_up_is_told_to_the_worker() -> None:
    async def run() -> None:
        one = FakeWorker(handler_cancellation=True)
        one.behave = "hang"
        async with cluster(one) as (url, client, workers):
            task = asyncio.create_task(client.post(url + "/generate", json={"text": "a"}))
            await until(lambda: len(one.requests) == 1)
            task.cancel()
            await until(lambda: workers.all[one.url].running == 0)
            assert workers.all[one.url].healthy

    asyncio.run(run())


def test_a_worker_that_stops_answering_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 0.05)

    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        one.behave = two.behave = "hang"
        async with cluster(one, two) as (url, client, workers):
            task = asyncio.create_task(client.post(url + "/generate", json={"text": "a"}))
            await until(lambda: bool(one.requests or two.requests))
            stuck, other = (one, two) if one.requests else (two, one)
            other.behave = "answer"
            stuck.well = False
            async with await task as answer:
                assert (await answer.json())["of"] == other.url
            stuck.well, stuck.behave = True, "answer"
            await until(lambda: workers.all[stuck.url].healthy)

    asyncio.run(run())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
def test_a_router_without_a_file_left_takes_no_worker_for_gone(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended all requests of all workers: one connection more than `ulimit -n` allows was enough."""
    monkeypatch.setattr(workers_module, "LOOK_S", 0.02)
    connect, short = aiohappyeyeballs.start_connection, False

    async def run() -> None:
        nonlocal short
        one, two = FakeWorker(), FakeWorker()
        ports: set[int] = set()

        async def refused(*, addr_infos: Any, **more: Any) -> Any:
            if short and addr_infos[0][4][1] in ports:
                raise OSError(number, os.strerror(number))
            return await connect(addr_infos=addr_infos, **more)

        monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", refused)
        async with cluster(one, two) as (url, client, workers):
            ports.update(worker.server.port for worker in (one, two) if worker.server.port)
            one.behave = two.behave = "hang"
            runs = asyncio.create_task(client.post(url + "/generate", json={"text": "a"}))
            await until(lambda: len(one.requests) + len(two.requests) == 1)
            short = True
            # Some go over connections of before, and hang.
            more = [asyncio.create_task(client.post(url + "/generate", json={"text": "a"})) for _ in range(8)]
            done, _ = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
            async with done.pop().result() as answer:
                assert (answer.status, "router cannot reach" in await answer.text()) == (503, True)
            await asyncio.sleep(0.2)  # looks that come to nothing either
            assert all(worker.healthy for worker in workers.all.values())
            one.behave = two.behave = "answer"
            one.release.set()
            two.release.set()
            async with await runs as answer:
                assert answer.status == 200
            assert {answer.status for answer in await asyncio.gather(*more)} <= {200, 503}

    asyncio.run(run())


@pytest.mark.parametrize("silent", [False, True])
def test_an_error_without_end_holds_up_no_request(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is what it says, or there is none; the other worker answers."""
    monkeypatch.setattr(answers, "ERROR_BYTES", 1000)
    monkeypatch.setattr(answers, "ERROR_S", 0.1 if silent else 60.0)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Full\r\nConnection: close\r\n\r\n" + b"x" * 100)
        try:
            while not silent:
                writer.write(b"x" * 65536)
                await writer.drain()
            await reader.read()
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def run() -> None:
        bad = FakeWorker()
        async with cluster(bad, FakeWorker(), routing="round_robin") as (url, client, workers):
            server = await asyncio.start_server(endless, "127.0.0.1", 0)
            proxied = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            [worker] = [each for each in workers.all.values() if each.url == bad.url]
            ask = answers.Answers.ask

            def asked(self: answers.Answers, request: Any, part: answers.Part) -> Any:
                there = part.worker.url if part.worker is not worker else proxied
                return ask(self, request, part._replace(worker=Worker(there)))

            monkeypatch.setattr(answers.Answers, "ask", asked)
            async with asyncio.timeout(50):
                for _ in range(4):
                    async with client.post(f"{url}/generate", json={"text": "a"}) as answer:
                        assert answer.status == 200
            server.close()

    asyncio.run(run())
