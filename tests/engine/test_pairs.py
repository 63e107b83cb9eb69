"""`sglang-hybrid cluster --prefill 1 --decode 1`: the answers of one server, whatever is handed over, and no leaks."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_hybrid.engine.launch.disaggregation import ENGINE_PORTS
from tests.engine.pairs import (
    CHECKSUMS,
    FLAGS,
    assert_nothing_is_left,
    complaints,
    direct,
    generate,
    needs,
    pair,
    url_of,
)
from tests.engine.prompts import prompts, words
from tests.engine.support import PATIENCE_S, Client, Reference, eventually
from tests.engine.test_cluster import Cluster, body_of, cached, text

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def made(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Servers notice by themselves which of the others is another one now: SGLang's looks are too rare to help.
    rare = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "3600"}
    with pair(models("gdn"), tmp_path_factory.mktemp("pair"), *CHECKSUMS, environment=rare) as started:
        yield started


@pytest.fixture(scope="module")
def alone(serve: Callable[..., Client]) -> Client:
    return serve("gdn", "--page-size", "64", *FLAGS)


@needs("mooncake")
def test_answers_are_those_of_one_server(made: Cluster, alone: Client, references: Callable[[str], Reference]) -> None:
    reference, batch = references("gdn"), prompts(7, 24)
    with ThreadPoolExecutor(4) as pool:
        paired = list(pool.map(lambda at: generate(made, batch[at], stream=bool(at % 2)), range(len(batch))))
    for prompt, (ours, _), (theirs, _) in zip(batch, paired, alone.generate_all(batch), strict=True):
        reference.assert_same(prompt, ours, theirs, "a pair and one server:")
    assert sum(hit > 0 for _, hit in paired) > 3
    assert_nothing_is_left(made)


@needs("mooncake")
def test_a_second_turn_hits_the_cache_of_the_server_that_prefills(made: Cluster, alone: Client) -> None:
    prompt, hits = words(random.Random(3), 300), []
    for _ in range(3):
        told, before = made.number("foretold_tokens_total"), made.batches()
        answer, hit = generate(made, prompt, 20)
        assert answer == alone.generate(prompt, 20)[0]
        assert hit == made.number("foretold_tokens_total") - told
        hits.append(hit)
        prompt = [*prompt, *answer, *words(random.Random(len(prompt)), 90)]
        made.hear(before)
    assert hits[0] == 0 < hits[1] < hits[2]


def told_of_the_cache(answer: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """Tokens of the prompt, of it cached, and why the others were not, as each endpoint tells of them."""
    if "meta_info" in answer:
        meta = answer["meta_info"]
        why = {name: n for name, n in meta["cached_tokens_details"].items() if name.startswith("miss_")}
        return meta["prompt_tokens"], meta["cached_tokens"], why
    usage = answer["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return prompt, cached(answer), details["miss_tokens"]


@needs("mooncake")
@pytest.mark.parametrize(
    "endpoint", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/generate"]
)
def test_every_endpoint_is_handed_over_and_tells_of_the_other_servers_cache(made: Cluster, endpoint: str) -> None:
    rng = random.Random(endpoint)
    model = made.ask("/v1/models")["data"][0]["id"]
    body = body_of(endpoint, text(rng, 60), text(rng, 10), model)
    before = made.batches()
    first = made.ask(endpoint, body)
    assert cached(first) == 0
    made.hear(before)
    second = made.ask(endpoint, body)
    assert cached(second) > 0
    assert "data: " in made.ask(endpoint, {**body, "stream": True})
    if endpoint == "/v1/messages":  # Anthropic's words have no reasons: what was written and read, and the rest
        usage = first["usage"]
        assert usage["cache_creation_input_tokens"] > usage["input_tokens"] > 0
        return
    for answer, reason in ((first, "never_seen"), (second, "below_granularity")):
        tokens, hit, why = told_of_the_cache(answer)
        assert sum(why.values()) == tokens - hit
        assert max(why, key=lambda name: why[name]).removeprefix("miss_") == reason


@needs("mooncake")
def test_several_prompts_of_one_request_and_clients_that_hang_up(made: Cluster, alone: Client) -> None:
    batch = [words(random.Random(at), 80 + at) for at in range(3)]
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    answers = made.ask("/generate", {"input_ids": batch, "sampling_params": sampling})
    assert [each["output_ids"] for each in answers] == [alone.generate(prompt, 6)[0] for prompt in batch]
    rng = random.Random(9)
    for _ in range(8):
        data = json.dumps({"input_ids": words(rng, 3000), "sampling_params": {"max_new_tokens": 64}}).encode()
        request = urllib.request.Request(made.url + "/generate", data, {"Content-Type": "application/json"})
        with pytest.raises(OSError, match="timed out"):
            urllib.request.urlopen(request, timeout=rng.uniform(0.05, 0.4))
    assert_nothing_is_left(made)


@needs("mooncake")
def test_what_does_not_arrive_as_it_left_is_no_answer(made: Cluster) -> None:
    """One bit of the state is another one at its arrival."""
    (made.log.parent / "decode-damaged").write_text("1")
    with pytest.raises(urllib.error.HTTPError) as caught:
        generate(made, words(random.Random(5), 150))
    with caught.value as error:
        assert error.code >= 500
        assert "checksum mismatch" in error.read().decode()
    (complaint,) = complaints(made)
    assert "KV checksum mismatch" in complaint
    assert len(generate(made, words(random.Random(6), 150))[0]) == 8
    assert_nothing_is_left(made)


@needs("mooncake")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_that_would_end_a_server_are_refused(made: Cluster, role: str) -> None:
    """They come past the router: it says none of it."""
    url, room = url_of(made, role), {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9}
    short = {"sampling_params": {"max_new_tokens": 2}, "input_ids": [5, 6, 7]}
    for given in (
        {**room, "bootstrap_room": -1},
        {**room, "bootstrap_room": 2**64},
        {**room, "bootstrap_room": 0},
        {**room, "bootstrap_room": 11, "bootstrap_host": "no such host"},
        {"bootstrap_room": 12},
        {**room, "bootstrap_room": 13, "return_logprob": True, "top_logprobs_num": 200},
        {},
    ):
        status, said = direct(url, {**short, **given})
        assert status == 400, said
    # Two in one room, and a server that is not there: no decode server waits for it, nobody is held up.
    twice = {**short, **room, "bootstrap_room": 14, "stream": False}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(direct, url, twice) for _ in range(2)]
        if role == "prefill":  # one is refused, whichever came second; nobody ever asks for the other
            assert wait(asked, 1).not_done
            assert len(generate(made, words(random.Random(8), 100))[0]) == 8
        statuses = sorted(each.result(PATIENCE_S)[0] for each in asked)
    assert statuses == [400, 500]
    assert len(generate(made, words(random.Random(7), 100))[0]) == 8
    assert_nothing_is_left(made)


@needs("mooncake")
def test_top_logprobs_are_handed_over_up_to_what_has_room(made: Cluster) -> None:
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    answer = made.ask("/generate", {**body, "top_logprobs_num": 128})
    assert len(answer["meta_info"]["output_top_logprobs"][0]) == 128
    with pytest.raises(urllib.error.HTTPError) as caught:
        made.ask("/generate", {**body, "top_logprobs_num": 129})
    with caught.value as error:
        assert error.code == 501
        assert "128" in error.read().decode()


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which a server's processes listen."""
    server = psutil.Process(pid)
    found = [each for one in [server, *server.children(recursive=True)] for each in one.net_connections("tcp")]
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


@needs("mooncake")
def test_servers_listen_where_they_say(made: Cluster) -> None:
    """On this machine alone; but for the transfer engine's two ports, and torch's store, which are told of."""
    for role in ("prefill", "decode"):
        url = url_of(made, role)
        sockets = listening(made.servers()[int(url.rpartition(":")[2])])
        beyond = {port for address, port in sockets if address not in ("127.0.0.1", "::1")}
        engine = {port for port in beyond if ENGINE_PORTS[0] <= port <= ENGINE_PORTS[1]}
        with urllib.request.urlopen(url + "/server_info", timeout=PATIENCE_S) as answer:
            store = json.loads(answer.read())["nccl_port"]
        assert len(engine) == 2
        assert beyond == {*engine, store}
        said = (made.log.parent / f"{role}-0.log").read_text()
        assert f"two ports from {ENGINE_PORTS[0]} to {ENGINE_PORTS[1]}" in said
    router = {
        each.laddr.ip for each in psutil.Process(made.process.pid).net_connections("tcp") if each.status == "LISTEN"
    }
    assert router == {"127.0.0.1"}


@needs("mooncake")
def test_noise_on_any_port_ends_nobody(made: Cluster) -> None:
    """Somebody looks what is there: bytes that are no message of any of the protocols."""
    noises = (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, b"\x00" * 64, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")
    for role in ("prefill", "decode"):
        for address, port in listening(made.servers()[int(url_of(made, role).rpartition(":")[2])]):
            for noise in noises:
                host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
                try:
                    with socket.create_connection((host, port), timeout=5) as sock:
                        sock.sendall(noise)
                except OSError:
                    continue
    for seed in (1, 2):
        assert len(generate(made, words(random.Random(seed), 200))[0]) == 8
    assert_nothing_is_left(made)


@needs("mooncake")
def test_a_server_that_prefills_is_killed_in_the_middle(made: Cluster, alone: Client) -> None:
    """The client gets an error at once, the other server is left with nothing, and both serve on."""
    prompt = words(random.Random(1), 9000)
    found: list[int] = []

    def ask() -> None:
        try:
            found.append(len(generate(made, prompt)[0]))
        except urllib.error.HTTPError as error:
            with error:
                found.append(error.code)

    ports = {each["role"]: int(each["url"].rpartition(":")[2]) for each in made.workers()}
    pid = made.servers()[ports["prefill"]]
    client = threading.Thread(target=ask)
    client.start()
    assert eventually(lambda: any(each["running"] for each in made.workers()), every_s=0.02)
    os.kill(pid, signal.SIGKILL)
    client.join(PATIENCE_S)
    assert found == [503]
    assert eventually(lambda: [each["healthy"] for each in made.workers()] == [True, True])
    assert made.servers()[ports["prefill"]] != pid
    short = prompt[:200]
    assert generate(made, short)[0] == alone.generate(short)[0]
    assert_nothing_is_left(made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "1"], "--decode is one or more: 0"),
        (["--prefill", "1", "--decode", "1", "--servers", "2"], "whole servers or pairs"),
        (["--prefill", "1", "--decode", "1", "--", "--disaggregation-mode", "decode"], "itself; put it before"),
    ],
)
def test_bad_input_is_answered_in_a_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "sglang_hybrid", "cluster", "--model-path", "x", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert message in done.stderr
