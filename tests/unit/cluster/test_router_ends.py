"""Workers that are told to stop, and addresses behind which another server is: no look at them fails."""

from __future__ import annotations

import argparse
import asyncio
import signal

import pytest

from sglang_hybrid.cluster import route
from sglang_hybrid.cluster import workers as workers_module
from sglang_hybrid.core.process import free_port
from tests.unit.cluster.fake import FakeWorker, cluster, until
from tests.unit.cluster.test_router_doubts import ended, hung, said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 0.05)


def test_one_that_is_told_to_stop_ends_what_it_has_and_gets_nothing_new() -> None:
    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two, routing="round_robin") as (url, client, workers):
            worker = workers.all[one.url]
            two.well = False
            await until(lambda: not workers.all[two.url].there)
            tasks = await hung(one, client, url, 4)
            two.well = True
            await until(lambda: workers.all[two.url].healthy)
            one.ending = True
            await until(lambda: not worker.healthy)
            assert worker.why == "it is told to stop"
            for _ in range(6):
                assert (await said(client, url))[0] == 200
            assert (len(one.requests), len(two.requests)) == (4, 6)
            looks = len(one.looks)
            await until(lambda: len(one.looks) > looks + 2)
            assert worker.running == 4, "they go on"
            one.behave = "answer"
            one.release.set()
            assert [status for status, _ in await ended(tasks)] == [200] * 4
            one.well = False
            await until(lambda: not worker.there)
            life = worker.life
            one.well, one.ending, one.server_name = True, False, "anew"
            await until(lambda: worker.healthy)
            assert worker.life == life + 1

    asyncio.run(run())


def test_a_second_signal_ends_a_router_at_once_and_quietly(caplog: pytest.LogCaptureFixture) -> None:
    options = argparse.Namespace(
        host="127.0.0.1", port=free_port(), routing="round_robin", api_key=None, max_body_mb=1.0
    )
    url = f"http://127.0.0.1:{options.port}"

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (_, client, _):
            ready = asyncio.Event()

            async def beside() -> None:
                ready.set()

            serving = asyncio.create_task(route.serve(options, [one.url], beside))
            await ready.wait()
            tasks = await hung(one, client, url, 1)
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
            with pytest.raises(asyncio.CancelledError):
                await serving
            await asyncio.sleep(0.2)  # some looks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert not [record.message for record in caplog.records if record.message.startswith("looking at worker")]


def test_where_all_are_told_to_stop_a_client_is_told_so() -> None:
    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, workers):
            one.ending = True
            await until(lambda: not workers.all[one.url].healthy)
            status, text = await said(client, url)
            assert status == 503
            assert "it is told to stop" in text

    asyncio.run(run())


def test_another_server_behind_an_address_is_met_anew() -> None:
    async def run() -> None:
        one, two = FakeWorker(server_name="a"), FakeWorker(server_name="b")
        async with cluster(one, two) as (_, _, workers):
            worker, index = workers.all[one.url], workers.index
            life, follower = worker.life, worker.follower
            assert index is not None
            index.apply(one.url, {"type": "BlockStored", "block_hashes": [7]})
            looks = len(one.looks)
            await until(lambda: len(one.looks) > looks + 2)
            assert (worker.life, worker.follower) == (life, follower)
            one.server_name = "c"
            await until(lambda: worker.life == life + 1)
            assert worker.healthy
            assert worker.follower is not follower
            assert index.reaches_of([7])[one.url].kv_tokens == 0, "what another one held is forgotten"

    asyncio.run(run())


def test_one_server_under_two_names_is_one_worker() -> None:
    async def run() -> None:
        one, two = FakeWorker(server_name="a"), FakeWorker(server_name="a")
        async with cluster(one, two) as (url, client, workers):
            [left_out] = [worker for worker in workers.all.values() if not worker.healthy]
            assert "it is the same server as http://" in left_out.why
            assert (await said(client, url))[0] == 200
            [kept] = workers.healthy
            (one if kept.url == one.url else two).well = False
            await until(lambda: left_out.healthy)

    asyncio.run(run())


def test_another_model_behind_an_address_is_left_out() -> None:
    async def run() -> None:
        one, two = FakeWorker(server_name="a"), FakeWorker(server_name="b")
        async with cluster(one, two) as (_, _, workers):
            one.server_name, one.model = "c", "other"
            await until(lambda: "another model" in workers.all[one.url].why)
            assert not workers.all[one.url].healthy
            two.well = False
            await until(lambda: workers.all[one.url].healthy)
            assert workers.all[one.url].model == "other", "where nobody is left to agree with"

    asyncio.run(run())


def test_a_router_that_stops_waits_for_answers_and_not_for_what_is_half_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "DRAIN_S", 10_000.0)
    monkeypatch.setattr(route, "ARRIVE_S", 0.1)
    head = b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 9\r\n"

    async def run() -> None:
        async def sent(what: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            writer.write(what)
            kept.append(writer)
            return reader

        kept: list[asyncio.StreamWriter] = []  # a connection that nobody holds is closed
        one = FakeWorker()
        async with asyncio.timeout(60):
            async with cluster(one) as (url, _, _workers):
                one.behave = "hang"
                whole = await sent(head + b'\r\n{"a": 12}')
                half = [await sent(head), await sent(head + b"\r\n"), await sent(head + b'\r\n{"a"')]
                await until(lambda: len(one.requests) == 1)
                one.behave = "answer"
                asyncio.get_running_loop().call_later(1.0, one.release.set)
            assert b"200 OK" in await whole.readline()
            assert [await each.read() for each in half] == [b"", b"", b""]
        for writer in kept:
            writer.close()

    asyncio.run(run())
