"""Servers that cannot be a pair are left out when the router meets them, and say why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_hybrid.cluster import route
from sglang_hybrid.cluster.peers import ALIKE, Peers
from sglang_hybrid.core.errors import ConfigError
from tests.unit.cluster.fake import FakeWorker, cluster, until
from tests.unit.cluster.test_pairs import FACTS, decode, prefill


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda: decode(page_size=1), "its --page-size is"),
        (lambda: decode(dtype="bfloat16"), "its --dtype is"),
        (lambda: decode(tp_size=2), "its --tp-size is"),
        (lambda: decode(version="0.5.20"), "its SGLang is"),
        (lambda: decode(sglang_hybrid="1"), "its sglang-hybrid is 1, not 2"),
        (lambda: decode(kv_cache_dtype="bfloat16"), "its --kv-cache-dtype is bfloat16, not float32"),
        (lambda: decode(mamba_ssm_dtype="bfloat16"), "its --mamba-ssm-dtype is bfloat16, not float32"),
        (lambda: decode(mamba_conv_dtype="bfloat16"), "its SGLANG_MAMBA_CONV_DTYPE is bfloat16, not float32"),
        (lambda: decode(mamba_radix_cache_strategy="no_buffer"), "its --mamba-radix-cache-strategy is no_buffer"),
        (lambda: decode(disaggregation_transfer_backend="nixl"), "its --disaggregation-transfer-backend is nixl"),
        (lambda: decode(disaggregation_enable_kv_checksum=True), "its --disaggregation-enable-kv-checksum is True"),
        (lambda: decode(speculative_algorithm="NGRAM"), "its --speculative-algorithm is NGRAM, not None"),
        (lambda: decode(quantization="fp8"), "its --quantization is fp8, not None"),
        (lambda: decode(pp_size=2), "its --pp-size is 2, not 1"),
        (lambda: decode(served_model_name="other"), "another model"),
        (lambda: decode(model_fingerprint="b"), "under the same name"),
        (lambda: decode(disaggregation_mode="null"), "--disaggregation-mode decode"),
        (lambda: prefill(), "--disaggregation-mode decode"),
    ],
)
def test_a_server_that_does_not_fit_is_left_out(second: Any, said: str) -> None:
    async def run() -> None:
        one, two = prefill(), second()
        two.seen.clear()  # until the first is met: of two that do not fit each other the later one is left out
        async with cluster(one, two, prefills=1) as (url, client, workers):
            await until(lambda: len(workers.healthy) == 1)
            two.seen.set()
            await until(lambda: all(worker.why != "not looked at yet" for worker in workers.all.values()))
            assert len(workers.healthy) == 1
            assert said in " ".join(worker.why for worker in workers.all.values())
            async with client.get(url + "/health") as answer:
                assert answer.status == 503
            async with client.post(url + "/generate", json={"text": "a"}) as answer:
                assert answer.status == 503
                assert said in await answer.text()
            async with client.get(url + "/workers") as answer:
                assert {each["role"] for each in await answer.json()} == {"prefill", "decode"}

    asyncio.run(run())


def test_a_server_that_comes_back_with_other_settings_is_met_anew() -> None:
    async def run() -> None:
        one, two = prefill(), decode()
        async with cluster(one, two, prefills=1) as (_, _, workers):
            assert len(workers.healthy) == 2
            workers.failed(workers.all[two.url], "gone")
            two.info["page_size"] = 1
            await until(lambda: "its --page-size is 1, not 64" in workers.all[two.url].why)
            two.info["page_size"] = 64
            await until(lambda: len(workers.healthy) == 2)

    asyncio.run(run())


def test_a_server_that_comes_back_behind_a_proxy_is_met_anew() -> None:
    """Something answers in its place meanwhile: what it says of the server is not an answer of the server."""

    async def run() -> None:
        one, two = prefill(), decode()
        async with cluster(one, two, prefills=1) as (_, _, workers):
            assert len(workers.healthy) == 2
            two.proxied = True
            await until(lambda: "answers 502" in workers.all[two.url].why)
            two.info["page_size"], two.proxied = 1, False
            await until(lambda: "its --page-size is 1, not 64" in workers.all[two.url].why)

    asyncio.run(run())


def test_every_setting_that_has_to_be_alike_is_tried_above() -> None:
    assert set(ALIKE) == set(FACTS) - {"disaggregation_mode", "served_model_name", "model_fingerprint"}


def test_the_bootstrap_port_is_told_or_named() -> None:
    async def run() -> None:
        one, two = prefill(disaggregation_bootstrap_port=None), decode()
        async with cluster(one, two, prefills=1) as (_, _, workers):
            await until(lambda: "--prefill http" in workers.all[one.url].why)

    asyncio.run(run())
    peers = Peers.named(["http://a:1,77", "[::1]:2"], ["b:3"])
    assert peers.urls == ["http://a:1", "http://[::1]:2", "http://b:3"]
    assert peers.bootstrap("http://a:1") == ("a", 77)
    peers._facts["http://[::1]:2"] = {"disaggregation_bootstrap_port": 5}
    assert peers.bootstrap("http://[::1]:2") == ("[::1]", 5)
    assert [peers.role(url) for url in peers.urls] == ["prefill", "prefill", "decode"]
    assert "page_size" in ALIKE


def test_a_prompt_that_no_server_finds_room_for_is_refused_at_once() -> None:
    async def run() -> None:
        small = {"max_total_num_tokens": 1000, "num_reserved_decode_tokens": 512}
        fleet = [prefill(), decode(**small), decode(**{**small, "max_total_num_tokens": 2000})]
        async with cluster(*fleet, prefills=1) as (url, client, _):
            for tokens, status in ((448, 200), (1472, 200), (1473, 400)):
                async with client.post(url + "/generate", json={"input_ids": list(range(tokens))}) as answer:
                    assert answer.status == status
                    assert status == 200 or "at most 1472 tokens" in await answer.text()
            assert any(len(raw) > 5000 for _, _, raw in fleet[2].requests)
            assert not any(len(raw) > 5000 for _, _, raw in fleet[1].requests)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefill", "http://a:1"], "--decode URL"),
        (["--decode", "http://a:1"], "--prefill URL"),
        (["--prefill", "http://a:1,0", "--decode", "http://a:2"], "1 to 65535"),
        (["--prefill", "http://a:1", "--decode", "http://a:1"], "named once"),
        (["--prefill", "http://a:1", "--decode", "http://a:2", "--worker", "http://a:3"], "whole servers or pairs"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        route.main(arguments)


def test_whole_servers_are_told_apart_from_pairs() -> None:
    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, _):
            async with client.post(url + "/generate", json={"text": "a", "sampling_params": {"n": 2}}) as answer:
                assert answer.status == 200
            assert b"bootstrap" not in one.requests[0][2]

    asyncio.run(run())
