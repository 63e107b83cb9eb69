"""A worker that hangs is out after some looks; until then it holds up as few requests as can be."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from sglang_hybrid.cluster import workers as workers_module
from tests.unit.cluster.fake import FakeWorker, cluster, until
from tests.unit.cluster.test_pairs import decode, prefill


class Unread(FakeWorker):
    """Does not tokenise before it is released."""

    asked = 0

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.asked += 1
        await self.release.wait()
        return await super()._tokenize(request)


def test_one_that_hangs_is_asked_for_one_prompt_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        hangs, other = Unread(), FakeWorker()
        async with cluster(hangs, other) as (url, client, workers):
            workers.all[other.url].sent = 1  # the other one is asked first
            tasks = [asyncio.create_task(client.post(url + "/generate", json={"text": "a" * 50}))]
            await until(lambda: hangs.asked == 1)
            for _ in range(10):
                async with client.post(url + "/generate", json={"text": "b" * 50}) as answer:
                    assert answer.status == 200
            assert hangs.asked == 1
            hangs.release.set()
            async with await tasks[0] as answer:
                assert answer.status == 200
            assert [worker.reading for worker in workers.all.values()] == [0, 0]

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["restart_points", "round_robin", "pairs"])
def test_one_that_missed_a_look_gets_no_requests_while_others_answer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        pairs = kind == "pairs"
        one, two = (decode(), decode()) if pairs else (FakeWorker(), FakeWorker())
        all_of_them = [prefill(), one, two] if pairs else [one, two]
        routing = "restart_points" if pairs else kind
        async with cluster(*all_of_them, routing=routing, prefills=int(pairs)) as (url, client, workers):
            for missed, expected in (([1, 0], [0, 6]), ([0, 2], [6, 0]), ([1, 2], [3, 3]), ([0, 0], [3, 3])):
                before = [len(one.requests), len(two.requests)]
                for worker, count in zip((one, two), missed, strict=True):
                    workers.all[worker.url].missed = count
                for number in range(6):
                    prompt = [number * 10 + at for at in range(9)]
                    async with client.post(url + "/generate", json={"input_ids": prompt}) as answer:
                        assert answer.status == 200
                got = [len(one.requests) - before[0], len(two.requests) - before[1]]
                assert got == expected, missed

    asyncio.run(run())
