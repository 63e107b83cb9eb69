"""The router while workers are busy, die, stop, cut their answers and come back, and clients hang up."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from sglang_hybrid.cluster import workers as workers_module
from tests.unit.cluster.fake import FakeWorker, cluster

PATIENCE_S = 120.0
BEHAVIOURS = ("answer", "answer", "stream", "busy", "die", "cut", "hang")


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_and_nothing_is_left(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 0.02)

    async def run() -> None:
        rng = random.Random(seed)
        fleet = [FakeWorker(handler_cancellation=True) for _ in range(4)]
        ends: dict[str, int] = {}

        async def ask(url: str, client: aiohttp.ClientSession) -> None:
            what, patience_s = "hung up", rng.choice((0.005, 0.05, PATIENCE_S))
            prompt = [rng.randrange(50) for _ in range(rng.choice((1, 9, 200)))]
            body = {"input_ids": prompt} if rng.random() < 0.5 else {"text": "a" * len(prompt)}
            try:
                async with asyncio.timeout(patience_s):
                    async with client.post(url + "/generate", json=body) as answer:
                        said = await answer.read()
                        assert answer.status in (200, 503), said
                        what = str(answer.status)
                        if answer.status == 200:
                            assert said == b"data: 0\n\ndata: 1\n\ndata: 2\n\n" or b'"of"' in said
            except aiohttp.ClientError:
                what = "broken off"
            except TimeoutError:
                assert patience_s < PATIENCE_S, "a request hangs"
            ends[what] = ends.get(what, 0) + 1

        async def change() -> None:
            while True:
                one = rng.choice(fleet)
                one.behave = rng.choice(BEHAVIOURS)
                one.well = one.behave != "hang" and rng.random() < 0.9
                await asyncio.sleep(0.01)

        async with cluster(*fleet) as (url, client, workers):
            changing = asyncio.create_task(change())
            for _ in range(10):
                await asyncio.gather(*(ask(url, client) for _ in range(30)))
            changing.cancel()
            for worker in fleet:
                worker.behave, worker.well = "answer", True
            for _ in range(1000):
                if len(workers.healthy) == len(fleet):
                    break
                await asyncio.sleep(0.02)
            assert len(workers.healthy) == len(fleet)
            for _ in range(100):
                if not any(worker.running for worker in workers.all.values()):
                    break
                await asyncio.sleep(0.02)
            for worker in workers.all.values():
                assert (worker.running, worker.waiting_tokens, len(worker.deadlines)) == (0, 0, 0)
            ended = sum(ends.values())
            for _ in range(8):
                await ask(url, client)
            assert sum(ends.values()) == ended + 8
        assert ended == 300
        assert ends["200"] > 8, "the eight at the end are not all"

    asyncio.run(run())
