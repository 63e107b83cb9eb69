"""The router while connections of workers break off: those that live keep their other requests, the others do not."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from sglang_hybrid.cluster import workers as workers_module
from sglang_hybrid.cluster.worker import Worker
from sglang_hybrid.cluster.workers import MISSED, Workers
from sglang_hybrid.routing.looks import ALIVE
from tests.unit.cluster.fake import FakeWorker, cluster, until
from tests.unit.cluster.test_pairs import decode, prefill

PATIENCE_S = 20.0
"""For requests that must not hang."""


async def said(client: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with client.post(url + "/generate", json={"text": "a"}) as answer:
        return answer.status, await answer.text()


async def ended(tasks: list[Any]) -> list[tuple[int, str]]:
    async with asyncio.timeout(PATIENCE_S):
        return list(await asyncio.gather(*tasks))


async def hung(one: FakeWorker, client: aiohttp.ClientSession, url: str, count: int) -> list[Any]:
    """Requests under way at `one`, which does not answer them."""
    one.behave = "hang"
    tasks = [asyncio.create_task(said(client, url)) for _ in range(count)]
    await until(lambda: len(one.requests) >= count)
    return tasks


@pytest.mark.parametrize("how", ["die", "cut"])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_connection_that_breaks_off_ends_no_other_request(
    how: str, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        one, more = (decode(), [prefill()]) if pairs else (FakeWorker(), [])
        async with cluster(*more, one, prefills=len(more)) as (url, client, workers):
            worker = workers.all[one.url]
            life, follower = worker.life, worker.follower
            tasks = await hung(one, client, url, 8)
            one.behave = how
            try:
                assert (await said(client, url))[0] == 503
                assert how == "die"
            except aiohttp.ClientError:
                assert how == "cut", "its beginning was out"
            await until(lambda: worker.healthy)
            assert (worker.why, worker.life, worker.follower) == ("", life, follower), "what it holds is still known"
            one.behave = "answer"
            one.release.set()
            assert [status for status, _ in await ended(tasks)] == [200] * 8
            assert (await said(client, url))[0] == 200

    asyncio.run(run())


def test_one_look_is_enough_for_all_that_break_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, workers):
            tasks = await hung(one, client, url, 8)
            one.seen.clear()
            one.behave = "die"
            one.release.set()
            for status, text in await ended(tasks):
                assert status == 503
                assert "broke off an answer: Server disconnected" in text
            one.behave = "answer"
            assert (await said(client, url))[0] == 503, "it gets no request before it was looked at"
            one.seen.set()
            await until(lambda: workers.all[one.url].healthy)
            assert one.looks == [ALIVE]
            assert (await said(client, url))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("how", ["breaks off", "proxied"])
def test_a_look_that_fails_ends_the_other_requests(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, workers):
            tasks = await hung(one, client, url, 8)
            one.behave, one.well, one.proxied = "die", how != "breaks off", how == "proxied"
            assert (await said(client, url))[0] == 503
            assert [status for status, _ in await ended(tasks)] == [503] * 8
            worker = workers.all[one.url]
            assert not worker.there
            assert worker.follower is None
            one.release.set()

    asyncio.run(run())


def test_a_doubted_worker_that_is_slow_has_as_many_looks_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)
    get = Workers._get

    def impatient(self: Workers, worker: Worker, path: str, patience_s: float = 0.1) -> Any:
        return get(self, worker, path, patience_s)

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, _):
            tasks = await hung(one, client, url, 2)
            monkeypatch.setattr(Workers, "_get", impatient)
            one.seen.clear()
            one.behave = "die"
            assert (await said(client, url))[0] == 503
            assert await ended(tasks) == [(503, tasks[0].result()[1])] * 2
            assert "it does not answer" in tasks[0].result()[1]
            assert len(one.looks) == MISSED
            one.seen.set()
            one.release.set()

    asyncio.run(run())


def test_what_comes_while_one_is_doubted_has_to_agree_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 0.05)

    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two) as (_, _, workers):
            index, (first, second) = workers.index, workers.all.values()
            one.seen.clear()
            workers.doubt(first, "it broke off an answer")
            two.model = "other"
            workers.failed(second, "gone")
            await until(lambda: "another model" in second.why)
            two.model = "m"
            await until(lambda: second.healthy)
            assert workers.index is index, "what the doubted one holds is in it"
            one.seen.set()
            await until(lambda: first.healthy)

    asyncio.run(run())


def test_one_that_nobody_listens_for_loses_its_requests_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: Any) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, workers):
            tasks = await hung(one, client, url, 3)
            worker = workers.all[one.url]
            monkeypatch.setattr(Workers, "_look", none)
            assert one.server.runner is not None
            for site in list(one.server.runner.sites):
                await site.stop()  # the connections stay
            assert (await said(client, url))[0] == 503
            assert [status for status, _ in await ended(tasks)] == [503] * 3
            assert "no connection: Connection refused" in worker.why
            one.release.set()

    asyncio.run(run())
