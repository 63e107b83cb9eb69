"""`sglang-hybrid cluster --prefill 1 --decode 1`: the answers of one server, whatever is handed over, and no leaks."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.engine.launch import disaggregation
from tests.engine.prompts import prompts, words
from tests.engine.support import PATIENCE_S, Client, Reference, eventually
from tests.engine.test_cluster import Cluster, body_of, cached, text

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = ("--max-mamba-cache-size", "40", "--max-total-tokens", "12032", "--max-running-requests", "4")
FLAGS += ("--chunked-prefill-size", "128")
COMPLAINTS = "Traceback|leak detected|does not add up|AssertionError"

needs_engine = pytest.mark.skipif(
    disaggregation.missing() is not None, reason=f"no transfer engine: {disaggregation.missing()}"
)


@pytest.fixture(scope="module")
def pair(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    kinds = ("--prefill", "1", "--decode", "1")
    made = Cluster(models("gdn"), tmp_path_factory.mktemp("pair"), *kinds, flags=FLAGS)
    try:
        ready = eventually(lambda: sum(each["healthy"] for each in made.workers()) == 2)
        assert ready, made.log.read_text()
        yield made
    finally:
        made.process.send_signal(signal.SIGINT)
        made.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def alone(serve: Callable[..., Client]) -> Client:
    return serve("gdn", "--page-size", "64", *FLAGS)


def generate(pair: Cluster, prompt: list[int], tokens: int = 8, stream: bool = False) -> tuple[list[int], int]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answer = pair.ask("/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": stream})
    if stream:
        events = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        assert len(events) > 1, "not all of it at the end"
        answer = json.loads(events[-1])
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def loads(pair: Cluster) -> list[dict[str, Any]]:
    """What each server says it has to do, and who it is."""
    found = []
    for each in pair.workers():
        with urllib.request.urlopen(each["url"] + "/v1/loads", timeout=PATIENCE_S) as answer:
            found += json.loads(answer.read())["loads"]
    return found


def assert_nothing_is_left(pair: Cluster) -> None:
    """No request, token or transfer is left anywhere; SGLang compares pages and slots itself whenever it is idle."""

    def idle() -> bool:
        counts = [
            value
            for load in loads(pair)
            for name, value in {**load, **load["disaggregation"]}.items()
            if name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens") or name.endswith("_queue_reqs")
        ]
        running = [each["running"] + each["waiting_tokens"] for each in pair.workers()]
        return len(counts) > 10 and not any(counts) and not any(running)

    assert eventually(idle), loads(pair)
    assert eventually(lambda: "flushed" in str(flushed(pair)))
    for log in pair.log.parent.glob("*-0.log"):
        assert not re.search(COMPLAINTS, log.read_text()), log.read_text()[-3000:]


def flushed(pair: Cluster) -> str:
    try:
        return str(pair.ask("/flush_cache", {}))
    except urllib.error.HTTPError as error:
        with error:
            return error.reason


@needs_engine
def test_answers_are_those_of_one_server(pair: Cluster, alone: Client, references: Callable[[str], Reference]) -> None:
    reference, batch = references("gdn"), prompts(7, 24)
    with ThreadPoolExecutor(4) as pool:
        paired = list(pool.map(lambda at: generate(pair, batch[at], stream=bool(at % 2)), range(len(batch))))
    for prompt, (ours, _), (theirs, _) in zip(batch, paired, alone.generate_all(batch), strict=True):
        reference.assert_same(prompt, ours, theirs, "a pair and one server:")
    assert sum(hit > 0 for _, hit in paired) > 3
    assert_nothing_is_left(pair)


@needs_engine
def test_a_second_turn_hits_the_cache_of_the_server_that_prefills(pair: Cluster, alone: Client) -> None:
    prompt, hits = words(random.Random(3), 300), []
    for _ in range(3):
        told = pair.number("foretold_tokens_total")
        answer, hit = generate(pair, prompt, 20)
        assert answer == alone.generate(prompt, 20)[0]
        assert hit == pair.number("foretold_tokens_total") - told
        hits.append(hit)
        prompt = [*prompt, *answer, *words(random.Random(len(prompt)), 90)]
        time.sleep(0.5)  # for the events
    assert hits[0] == 0 < hits[1] < hits[2]


@needs_engine
@pytest.mark.parametrize(
    "endpoint", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/generate"]
)
def test_every_endpoint_is_handed_over(pair: Cluster, endpoint: str) -> None:
    rng = random.Random(endpoint)
    model = pair.ask("/v1/models")["data"][0]["id"]
    body = body_of(endpoint, text(rng, 60), text(rng, 10), model)
    assert cached(pair.ask(endpoint, body)) == 0
    time.sleep(0.5)
    assert cached(pair.ask(endpoint, body)) > 0
    assert "data: " in pair.ask(endpoint, {**body, "stream": True})


@needs_engine
def test_several_prompts_of_one_request_and_clients_that_hang_up(pair: Cluster, alone: Client) -> None:
    batch = [words(random.Random(at), 80 + at) for at in range(3)]
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    answers = pair.ask("/generate", {"input_ids": batch, "sampling_params": sampling})
    assert [each["output_ids"] for each in answers] == [alone.generate(prompt, 6)[0] for prompt in batch]
    rng = random.Random(9)
    for _ in range(8):
        data = json.dumps({"input_ids": words(rng, 3000), "sampling_params": {"max_new_tokens": 64}}).encode()
        request = urllib.request.Request(pair.url + "/generate", data, {"Content-Type": "application/json"})
        with pytest.raises(OSError, match="timed out"):
            urllib.request.urlopen(request, timeout=rng.uniform(0.05, 0.4))
    assert_nothing_is_left(pair)


@needs_engine
def test_a_server_that_prefills_is_killed_in_the_middle(pair: Cluster, alone: Client) -> None:
    """The client gets an error at once, the other server is left with nothing, and both serve on."""
    prompt = words(random.Random(1), 9000)
    found: list[int] = []

    def ask() -> None:
        try:
            found.append(len(generate(pair, prompt)[0]))
        except urllib.error.HTTPError as error:
            with error:
                found.append(error.code)

    ports = {each["role"]: int(each["url"].rpartition(":")[2]) for each in pair.workers()}
    pid = pair.servers()[ports["prefill"]]
    client = threading.Thread(target=ask)
    client.start()
    assert eventually(lambda: any(each["running"] for each in pair.workers()), every_s=0.02)
    os.kill(pid, signal.SIGKILL)
    client.join(PATIENCE_S)
    assert found == [503]
    assert eventually(lambda: [each["healthy"] for each in pair.workers()] == [True, True])
    assert pair.servers()[ports["prefill"]] != pid
    short = prompt[:200]
    assert generate(pair, short)[0] == alone.generate(short)[0]
    assert_nothing_is_left(pair)


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
