"""The router of pairs before fake servers: what either side is told, who answers, and what happens when one fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from sglang_hybrid.cluster import answers as answers_module
from sglang_hybrid.cluster import workers as workers_module
from sglang_hybrid.cluster.handover import appended
from sglang_hybrid.routing.index import block_hashes
from tests.unit.cluster.fake import PAGE, FakeWorker, cluster, until
from tests.unit.cluster.test_router import told

FACTS: dict[str, Any] = {
    "version": "0.5.21", "sglang_hybrid": "2", "served_model_name": "m", "model_fingerprint": "a", "page_size": 64,
    "dtype": "float32", "kv_cache_dtype": "float32", "mamba_ssm_dtype": "float32", "mamba_conv_dtype": "float32",
    "mamba_radix_cache_strategy": "extra_buffer", "disaggregation_transfer_backend": "mooncake",
    "disaggregation_enable_kv_checksum": False, "speculative_algorithm": None, "quantization": None,
    "tp_size": 1, "pp_size": 1,
}  # fmt: skip
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def prefill(**more: Any) -> FakeWorker:
    facts = {**FACTS, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998, **more}
    return FakeWorker(handler_cancellation=True, **facts)


def decode(**more: Any) -> FakeWorker:
    return FakeWorker(handler_cancellation=True, **{**FACTS, "disaggregation_mode": "decode", **more})


def bodies(worker: FakeWorker) -> list[dict[str, Any]]:
    return [json.loads(raw) for _, _, raw in worker.requests]


@pytest.mark.parametrize("endpoint", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_both_sides_get_the_request_and_a_room(endpoint: str) -> None:
    async def run() -> None:
        one, two = prefill(), decode()
        async with cluster(one, two, prefills=1) as (url, client, workers):
            given = {"unheard_of": [1, {"a": None}], "cache_salt": "tenant", "stream": True}
            raw = json.dumps(given, indent=3).encode()
            two.behave = "stream"
            headers = {"Authorization": "Bearer k", "X-Override-Bootstrap-Room": "7"}
            async with client.post(url + endpoint, data=raw, headers=headers) as answer:
                assert answer.headers["X-Of"] == two.url
                assert await answer.text() == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
            await until(lambda: not any(worker.running for worker in workers.all.values()))
            (_, seen, sent), (theirs,), (ours,) = two.requests[0], bodies(one), bodies(two)
            assert sent.startswith(raw.rstrip()[:-1]), "what the client wrote stays as it is"
            assert seen["Authorization"] == "Bearer k"
            assert not any(name.lower().startswith("x-override-bootstrap") for name in seen)
            room = {name: ours.pop(name) for name in ROOM}
            assert ours == given
            assert theirs == {**given, **room, "stream": False}
            assert room == {**room, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
            async with client.post(url + endpoint, data=b" {}\n ") as answer:
                assert answer.status == 200
            assert bodies(two)[1]["bootstrap_room"] != room["bootstrap_room"]
            assert set(bodies(two)[1]) == set(ROOM)

    asyncio.run(run())


def test_messages_have_their_room_in_headers() -> None:
    async def run() -> None:
        one, two = prefill(), decode()
        async with cluster(one, two, prefills=1) as (url, client, _):
            raw = b'{"messages": [], "stream": true}'
            async with client.post(url + "/v1/messages", data=raw) as answer:
                assert (await answer.json())["of"] == two.url
            rooms = []
            for worker, stream in ((one, False), (two, True)):
                (_, seen, sent) = worker.requests[0]
                assert json.loads(sent) == {"messages": [], "stream": stream}
                rooms.append([seen[f"X-Override-Bootstrap-{name}"] for name in ("Host", "Port", "Room")])
            assert rooms[0] == rooms[1]
            assert rooms[0][:2] == ["127.0.0.1", "8998"]

    asyncio.run(run())


def test_the_policy_chooses_who_prefills_and_the_load_who_decodes() -> None:
    async def run() -> None:
        fleet = [prefill(), prefill(), decode(), decode()]
        async with cluster(*fleet, prefills=2) as (url, client, workers):
            for worker in fleet[:2]:
                assert await worker.asked_for_snapshot()
            index, ids = workers.index, list(range(5, 60))
            assert index is not None
            names = block_hashes(ids[:-1], PAGE)
            await fleet[1].tell(told(names), told(names[8:9], state=True))
            await until(lambda: index.reaches(ids)[fleet[1].url].resume_tokens == 9 * PAGE)
            answers = set()
            for _ in range(4):
                async with client.post(url + "/generate", json={"input_ids": ids}) as answer:
                    answers.add((await answer.json())["of"])
            assert [len(worker.requests) for worker in fleet] == [0, 4, 2, 2]
            assert answers == {fleet[2].url, fleet[3].url}
            assert all(worker.waiting_tokens == worker.running == 0 for worker in workers.all.values())

    asyncio.run(run())


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["busy", "silent", "die", "unreachable", "500"])
def test_another_pair_answers_in_place_of_one_that_cannot(side: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "ERROR_S", 0.1)

    async def run() -> None:
        fleet = [prefill(), prefill(), decode(), decode()]
        first, second = (fleet[0], fleet[1]) if side == "prefill" else (fleet[2], fleet[3])
        async with cluster(*fleet, prefills=2, routing="round_robin") as (url, client, workers):
            if how == "unreachable":
                await first.server.close()
            first.behave = how
            if side == "prefill":
                fleet[2].delay_s = fleet[3].delay_s = 0.5  # as one that waits for its prompt
            for _ in range(4):
                async with client.post(url + "/generate", json={"text": "a"}) as answer:
                    assert (await answer.json())["of"] in (fleet[2].url, fleet[3].url)
            assert second.requests
            assert all(worker.running == worker.waiting_tokens == 0 for worker in workers.all.values())
            rooms = [each["bootstrap_room"] for each in bodies(second)]
            assert len(set(rooms)) == len(rooms), "a second try is in a room of its own"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("side", "how", "status", "said"),
    [
        ("prefill", "busy", 503, "queue is full"),
        ("prefill", "die", 503, "broke off a prefill"),
        ("prefill", "unreachable", 503, "no pair of servers"),
        ("prefill", "500", 502, "the server that prefills failed"),
        ("prefill", "400", 400, "400 of"),
        ("decode", "busy", 503, "queue is full"),
        ("decode", "die", 503, "broke off an answer"),
        ("decode", "unreachable", 503, "no pair of servers"),
        ("decode", "500", 500, "500 of"),
        ("decode", "400", 400, "400 of"),
    ],
)
def test_a_pair_that_fails_is_an_error_and_the_other_side_is_hung_up_on(
    side: str, how: str, status: int, said: str
) -> None:
    async def run() -> None:
        one, two = prefill(), decode()
        bad, other = (one, two) if side == "prefill" else (two, one)
        async with cluster(one, two, prefills=1) as (url, client, workers):
            bad.behave, other.behave = how, "hang"
            if how == "unreachable":
                await bad.server.close()
            async with client.post(url + "/generate", json={"text": "a", "stream": True}) as answer:
                assert answer.status == status
                assert said in await answer.text()
            assert len(bad.requests) <= 1
            await until(lambda: other.hung_up == len(other.requests))
            await until(lambda: not any(worker.running for worker in workers.all.values()))
            assert workers.all[other.url].healthy

    asyncio.run(run())


def test_a_request_that_ends_servers_does_not_end_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "LOOK_S", 1000.0)

    async def run() -> None:
        fleet = [prefill() for _ in range(4)]
        for worker in fleet:
            worker.behave = "die"
        last = decode()
        last.behave = "hang"
        async with cluster(*fleet, last, prefills=4) as (url, client, workers):
            for worker in fleet:
                worker.well = False  # once it is looked at again
            async with client.post(url + "/generate", json={"text": "a"}) as answer:
                assert answer.status == 503
            assert sum(len(worker.requests) for worker in fleet) == 2
            assert len(workers.healthy) == 3

    asyncio.run(run())


def test_an_answer_that_breaks_off_breaks_off_for_the_client() -> None:
    async def run() -> None:
        fleet = [prefill(), decode(), decode()]
        fleet[1].behave = fleet[2].behave = "cut"
        async with cluster(*fleet, prefills=1) as (url, client, _):
            with pytest.raises(aiohttp.ClientError):
                async with client.post(url + "/generate", json={"text": "a"}) as answer:
                    await answer.read()
            assert len(fleet[1].requests) + len(fleet[2].requests) == 1, "its beginning is out"

    asyncio.run(run())


def test_a_client_that_hangs_up_hangs_up_on_both() -> None:
    async def run() -> None:
        one, two = prefill(), decode()
        one.behave = two.behave = "hang"
        async with cluster(one, two, prefills=1) as (url, client, workers):
            task = asyncio.create_task(client.post(url + "/generate", json={"text": "a"}))
            await until(lambda: len(one.requests) == len(two.requests) == 1)
            task.cancel()
            await until(lambda: one.hung_up == two.hung_up == 1)
            assert all(worker.healthy and not worker.running for worker in workers.all.values())

    asyncio.run(run())


def test_a_prefill_that_does_not_end_with_the_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hybrid.cluster.pairs.LEAVE_S", 0.05)

    async def run() -> None:
        one, two = prefill(), decode()
        one.behave = "hang"
        async with cluster(one, two, prefills=1) as (url, client, workers):
            async with client.post(url + "/generate", json={"text": "a"}) as answer:
                assert (await answer.json())["of"] == two.url
            await until(lambda: one.hung_up == 1 and not workers.all[one.url].running)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", b"[1]", 400),
        ("/generate", b"", 400),
        ("/generate", b'{"text": "a", "bootstrap_host": "10.0.0.9"}', 400),
        ("/generate", b'{"text": "a", "sampling_params": {"n": 2}}', 501),
        ("/generate", b'{"text": ["a"], "sampling_params": [{"n": 2}]}', 501),
        ("/generate", b'{"text": "a", "return_logprob": true, "logprob_start_len": 0}', 501),
        ("/v1/completions", b'{"prompt": "a", "echo": true, "logprobs": 1}', 501),
        ("/generate", b'{"text": "a", "return_logprob": true, "top_logprobs_num": 129}', 501),
        ("/generate", b'{"text": ["a", "b"], "return_logprob": true, "top_logprobs_num": [1, 129]}', 501),
        ("/v1/completions", b'{"prompt": "a", "logprobs": 129}', 501),
        ("/v1/chat/completions", b'{"messages": [], "logprobs": true, "top_logprobs": 129}', 501),
        ("/v1/chat/completions", b'{"messages": [], "logprobs": true, "top_logprobs": 20}', 200),
        ("/v1/chat/completions", b'{"messages": [], "n": 3}', 501),
        ("/v1/responses", b'{"input": "a", "previous_response_id": "r"}', 501),
        ("/v1/responses", b'{"input": "a", "background": true}', 501),
        ("/v1/chat/completions", b'{"messages": [], "n": 1, "logprobs": true}', 200),
        ("/v1/models", b"", 200),
    ],
)
def test_what_pairs_cannot_answer_is_said(path: str, body: bytes, status: int) -> None:
    async def run() -> None:
        one, two = prefill(), decode()
        async with cluster(one, two, prefills=1) as (url, client, _):
            async with client.request("GET" if path == "/v1/models" else "POST", url + path, data=body) as answer:
                assert answer.status == status, await answer.text()
            assert status == 200 or not one.requests + two.requests

    asyncio.run(run())


def test_fields_are_added_behind_what_is_there() -> None:
    assert appended(b'{"a": 1.0} \r\n', {"a": 1.0}, {"b": "c"}) == b'{"a": 1.0,"b":"c"}'
    assert appended(b"{ }", {}, {"b": 2}) == b'{ "b":2}'
