"""The router before fake workers: what arrives, what comes back, and what happens when workers fail."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from signal import SIGTERM
from typing import Any

import aiohttp
import pytest

from sglang_hybrid.cluster.router import Router
from sglang_hybrid.cluster.worker import checked
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import free_port
from sglang_hybrid.routing.index import STATE_KIND, Reach, block_hashes
from tests.unit.cluster.fake import PAGE, FakeWorker, cluster, until

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}],
    "cache_hints": {"final": True},
    "cache_salt": "tenant",
    "unheard_of": [1, {"a": None}],
}


def told(names: list[int], state: bool = False, kind: str = "BlockStored") -> dict[str, Any]:
    more = {"kv_cache_spec_kind": STATE_KIND} if state else {}
    return {"type": kind, "block_hashes": names, "medium": "GPU", **more}


def test_a_request_arrives_as_it_was_sent_and_its_answer_comes_back() -> None:
    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, _):
            raw = json.dumps(BODY, indent=3).encode()
            headers = {"Authorization": "Bearer k", "X-Own": "1", "Content-Type": "application/json"}
            async with client.post(url + "/v1/chat/completions?a=%20b", data=raw, headers=headers) as answer:
                assert answer.status == 200
                assert answer.headers["X-Of"] == one.url
                assert await answer.json() == {"of": one.url}
            path, seen, body = one.requests[-1]
            assert (path, body) == ("/v1/chat/completions?a=%20b", raw)
            assert (seen["Authorization"], seen["X-Own"]) == ("Bearer k", "1")
            one.behave = "stream"
            async with client.post(url + "/generate", json={"text": "a", "stream": True}) as answer:
                assert await answer.text() == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
            async with client.get(url + "/v1/models") as answer:
                assert answer.status == 200
            async with client.get(url + "/update_weights_from_disk") as answer:
                assert answer.status == 404
                assert one.url in await answer.text()

    asyncio.run(run())


def test_a_prompt_goes_where_it_can_be_resumed() -> None:
    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two) as (url, client, workers):
            for worker in (one, two):
                assert await worker.asked_for_snapshot()
            index = workers.index
            assert index is not None
            messages = [{"role": "user", "content": "w" * 200}]
            ids = [ord(letter) for letter in json.dumps(messages)]
            names = block_hashes(ids[:-1], PAGE)
            await two.tell(told(names), told(names[20:21], state=True))
            await until(lambda: index.reaches(ids)[two.url] == Reach(21 * PAGE, len(names) * PAGE))
            for _ in range(4):
                async with client.post(url + "/v1/chat/completions", json={"messages": messages}) as answer:
                    assert (await answer.json())["of"] == two.url
            async with client.post(url + "/generate", json={"input_ids": ids}) as answer:
                assert (await answer.json())["of"] == two.url
            async with client.get(url + "/metrics") as answer:
                assert f"sglang_hybrid_router_foretold_tokens_total {5 * 21 * PAGE}.0" in await answer.text()
            assert all(worker.waiting_tokens == worker.running == 0 for worker in workers.all.values())

    asyncio.run(run())


def test_requests_of_one_key_stay_together_where_nothing_is_known() -> None:
    async def run() -> None:
        async with cluster(FakeWorker(), FakeWorker(), routing="sessions") as (url, client, _):

            async def at(**said: str) -> str:
                async with client.post(url + "/v1/chat/completions", json={"messages": [], **said}) as answer:
                    return str((await answer.json())["of"])

            mine = await at(prompt_cache_key="k", cache_salt="me")
            others = await at(prompt_cache_key="k", cache_salt="you")
            assert mine != others, "equal workers take turns"
            for _ in range(5):
                await at()
                assert await at(prompt_cache_key="k", cache_salt="me") == mine
                assert await at(prompt_cache_key="k", cache_salt="you") == others

    asyncio.run(run())


def test_tokens_that_are_computed_already_do_not_wait_twice() -> None:
    async def run() -> None:
        one, two = FakeWorker(handler_cancellation=True), FakeWorker(handler_cancellation=True)
        one.behave = two.behave = "hang"
        async with cluster(one, two) as (url, client, workers):
            asked = []
            for number in (1, 2):  # the second finds its beginning on its way
                asked.append(asyncio.create_task(client.post(url + "/generate", json={"input_ids": [7] * 2001})))
                await until(lambda number=number: len(one.requests) + len(two.requests) == number)  # type: ignore[misc]
            waiting = sorted(worker.waiting_tokens for worker in workers.all.values())
            assert waiting == [0, 2001 + 1]
            one.release.set()
            two.release.set()
            for task in asked:
                assert (await task).status == 200
            assert all(worker.waiting_tokens == 0 for worker in workers.all.values())

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "reuses"),
    [
        ([{"effective_max_running_requests_per_dp": 2}], False),
        ([{"effective_max_running_requests_per_dp": 1}, {"effective_max_running_requests_per_dp": 1}], False),
        ([{"effective_max_running_requests_per_dp": 3}], True),
        ([], True),
        ([None, {"effective_max_running_requests_per_dp": "2"}], True),
        ("2", True),
    ],
)
def test_a_worker_that_runs_no_more_requests_is_left_for_one_that_does(said: Any, reuses: bool) -> None:
    """Two requests with one beginning are under way at a worker, or it is full with them; a third comes."""

    async def run() -> None:
        one = FakeWorker(handler_cancellation=True, internal_states=said)
        two = FakeWorker(handler_cancellation=True, internal_states=said)
        one.behave = two.behave = "hang"
        async with cluster(one, two) as (url, client, _):
            tasks = []
            for number in (1, 2, 3):
                tasks.append(asyncio.create_task(client.post(url + "/generate", json={"input_ids": [7] * 2001})))
                await until(lambda number=number: len(one.requests) + len(two.requests) == number)  # type: ignore[misc]
            assert sorted([len(one.requests), len(two.requests)]) == ([0, 3] if reuses else [1, 2])
            one.release.set()
            two.release.set()
            await asyncio.gather(*tasks)

    asyncio.run(run())


def test_what_was_sent_to_a_worker_is_forgotten_when_it_starts_anew() -> None:
    async def run() -> None:
        one, two = FakeWorker(handler_cancellation=True), FakeWorker(handler_cancellation=True)
        async with cluster(one, two) as (url, client, workers):

            async def waits() -> int:
                """Tokens that the same prompt has to compute where it is sent now."""
                one.behave = two.behave = "hang"
                before = len(one.requests) + len(two.requests)
                task = asyncio.create_task(client.post(url + "/generate", json={"input_ids": [7] * 2001}))
                await until(lambda: len(one.requests) + len(two.requests) > before)
                waiting = sum(worker.waiting_tokens for worker in workers.all.values())
                task.cancel()
                await until(lambda: not any(worker.running for worker in workers.all.values()))
                return waiting

            assert await waits() == 2001
            assert await waits() == 1, "its beginning is on its way"
            for worker in workers.all.values():
                workers.failed(worker, "gone")
            await until(lambda: len(workers.healthy) == 2)
            assert await waits() == 2001

    asyncio.run(run())


@pytest.mark.parametrize("damage", ["gap", "restart"])
def test_lost_events_and_a_new_start_forget_and_ask_again(damage: str) -> None:
    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (_, _, workers):
            assert await one.asked_for_snapshot()
            index, prompt = workers.index, list(range(17))
            assert index is not None
            names = block_hashes(prompt[:-1], PAGE)
            one.number = 5
            await one.tell(told(names), told(names, state=True))
            await until(lambda: index.reaches(prompt)[one.url].resume_tokens == 16)
            await one.tell(told(names), number=5)  # doubled
            await one.tell(raw=b"\xc1 garbage", number=6)
            await one.tell({"type": "New"}, number=7)
            await one.tell(told(names[3:], state=True, kind="BlockRemoved"), number=8)
            await until(lambda: index.reaches(prompt)[one.url].resume_tokens == 12)
            await one.tell(told(names[:2]), number=12 if damage == "gap" else 0)
            assert await one.asked_for_snapshot()
            await until(lambda: index.reaches(prompt)[one.url] == Reach(0, 8))
            events = workers.shown()[0]["events"]
            assert events["unknown"] == 2
            assert (events["gaps"], events["snapshots"]) == (1, 2)

    asyncio.run(run())


def test_workers_that_do_not_belong_together_are_left_out() -> None:
    async def run() -> None:
        one, other, pages = FakeWorker(), FakeWorker(model="other"), FakeWorker(page=PAGE * 2)
        async with cluster(one) as (_, _, workers):
            pass
        one = FakeWorker()
        async with cluster(one, other, pages) as (url, client, workers):
            await until(
                lambda: all(worker.healthy or worker.why != "not looked at yet" for worker in workers.all.values())
            )
            models = {worker.model for worker in workers.healthy}
            assert len(models) == 1
            whys = " ".join(str(worker.why) for worker in workers.all.values())
            assert "another model" in whys or "another --page-size" in whys
            async with client.post(url + "/generate", json={"text": "a"}) as answer:
                assert answer.status == 200

    asyncio.run(run())


def test_keys_bodies_and_broadcasts() -> None:
    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two, api_key="secret", max_body_mb=0.001) as (url, client, _):
            for page in ("/workers", "/metrics"):
                async with client.get(url + page, headers={"Authorization": "Bearer schlüssel"}) as answer:
                    assert answer.status == 401
                async with client.get(url + page, headers={"Authorization": "Bearer secret"}) as answer:
                    assert answer.status == 200
            async with client.get(url + "/health") as answer:
                assert answer.status == 200
            for key, told in (("wrong", False), ("secret", True)):  # where workers are is for those that have the key
                async with client.get(url + "/nowhere", headers={"Authorization": f"Bearer {key}"}) as answer:
                    assert answer.status == 404
                    assert (one.url in await answer.text()) is told
            async with client.post(url + "/generate", data=b"x" * 2000) as answer:
                assert answer.status == 413
                assert "--max-body-mb" in await answer.text()
            async with client.post(url + "/flush_cache") as answer:
                assert set(await answer.json()) == {one.url, two.url}
            for body in (
                b"",
                b"[1]",
                b"{",
                b"\xff",
                b'{"input_ids": "x"}',
                b'{"input_ids": [[]]}',
                b'{"prompt": [1, -1]}',
            ):
                for path in ("/generate", "/v1/completions", "/v1/messages"):
                    async with client.post(url + path, data=body) as answer:
                        assert answer.status == 200, "what is wrong with it says the worker"

    asyncio.run(run())


@pytest.mark.parametrize("routing", ["restart_points", "sessions", "text"])
def test_salts_of_tenants_are_nowhere_in_what_a_router_keeps(routing: str) -> None:
    """Not in its index, nor in what policies remember: digests alone."""
    salt, key = "the-salt-of-a-tenant", "the-key-of-a-conversation"

    async def run() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with cluster(one, two, routing=routing) as (url, client, workers):
            names = block_hashes(list(range(40)), PAGE, salt)
            index = workers.index
            assert index is not None
            assert await one.asked_for_snapshot()
            await one.tell({**told(names), "cache_salt": salt, "token_ids": [1]})  # as SGLang tells of blocks
            await until(lambda: bool(index._blocks))
            for path in ("/generate", "/v1/chat/completions"):
                body = {"input_ids": list(range(40)), "messages": [], "cache_salt": salt, "prompt_cache_key": key}
                async with client.post(url + path, json=body) as answer:
                    assert answer.status == 200
            router = next(each for each in gc.get_objects() if type(each) is Router and each.workers is workers)
            kept = [router._policy, router._plain, index, *workers.all.values(), router.numbers.text()]
            words = words_in(kept)
            assert words >= set(workers.all), "they are looked at"
            assert not any(salt in each or key in each for each in words)

    asyncio.run(run())


def words_in(kept: list[Any]) -> set[str]:
    """Every text that objects of ours and containers hold."""
    found, seen = set[str](), set[int]()
    while kept:
        each = kept.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (str, bytes)):
            found.add(each if isinstance(each, str) else each.decode())
        elif isinstance(each, Mapping):
            kept += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset, deque)):
            kept += each
        elif type(each).__module__.startswith("sglang_hybrid"):
            kept += vars(each).values() if hasattr(each, "__dict__") else []
    return found


@pytest.mark.parametrize(
    "urls", [[], ["ftp://a"], ["http://a:1", "a:1"], ["http://a/b"], ["http://a:x"], ["http://"], ["nonsense"]]
)
def test_addresses_of_workers(urls: list[str]) -> None:
    with pytest.raises(ConfigError):
        checked(urls)
    assert checked(["http://a:1/", "b:2", "http://c"]) == ["http://a:1", "http://b:2", "http://c"]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_router_ends_when_it_is_told_to(signals: int) -> None:
    """The first signal lets a request end, the second does not."""

    async def run() -> None:
        one = FakeWorker(handler_cancellation=True)
        await one.server.start_server()
        one.behave, port = "hang", free_port()
        command = [sys.executable, "-m", "sglang_hybrid", "route", "--worker", one.url, "--port", str(port)]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert "1 of 1 workers" in line
        async with aiohttp.ClientSession() as client:
            asked = asyncio.create_task(client.post(f"http://127.0.0.1:{port}/generate", json={"text": "a"}))
            await until(lambda: len(one.requests) == 1)
            for _ in range(signals):
                process.send_signal(SIGTERM)
                await asyncio.sleep(0.5)
            if signals == 1:
                assert process.returncode is None
                one.release.set()
                assert (await asked).status == 200
            else:
                with suppress(aiohttp.ClientError):
                    assert (await asked).status == 503
            assert await process.wait() == signals - 1
        await one.stop()

    asyncio.run(run())
