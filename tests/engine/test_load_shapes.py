"""Loads that nobody plans for, on a real server: every answer arrives, is right, and nothing is left behind.

Bounds are counted in passes of the scheduler, not in seconds: what waits without progress makes too many or none.
"""

from __future__ import annotations

import json
import random
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.prompts import words
from tests.engine.support import PATIENCE_S, Client, Prompt, Reference, eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLOTS = ("--max-mamba-cache-size", "32", "--max-running-requests", "8")
SMALL = (*SLOTS, "--max-total-tokens", "6000", "--chunked-prefill-size", "512", "--enable-metrics")
"""Less than any of these loads wants; the queue is longer than either pool."""


@pytest.fixture
def client(serve: Callable[..., Client]) -> Client:
    client = serve("gdn", *SMALL)
    client.flush()
    return client


def together(client: Client, prompts: list[Prompt], tokens: int) -> list[dict[str, Any]]:
    """One request of SGLang's for all of them; it puts them into the queue at once."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answers: list[dict[str, Any]] = client.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    return answers


def usage(client: Client) -> dict[str, float]:
    found = re.findall(r"^sglang:(num_running_reqs|num_queue_reqs)\{[^}]*\} (\S+)$",
                       client.get("/metrics"), re.MULTILINE)  # fmt: skip
    return {name: float(value) for name, value in found}


def assert_empty(client: Client) -> None:
    """Nobody runs or waits, everything can be freed, and the next request is served."""
    client.flush()
    assert len(client.generate([3, 4, 5], 1)[0]) == 1  # a pass, so that the gauges are written
    client.flush()
    assert eventually(lambda: usage(client) == {"num_running_reqs": 0, "num_queue_reqs": 0}, 0.5)
    log = client.server.log.read_text(errors="replace")
    assert not re.search("Traceback|leak detected|AssertionError", log)


def test_a_burst_of_two_thousand(client: Client, references: Callable[[str], Reference]) -> None:
    rng, reference = random.Random(41), references("gdn")
    prompts = [words(rng, rng.randint(20, 39)) for _ in range(2000)]
    before = client.batches("Prefill")
    answers = together(client, prompts, 2)
    assert [len(answer["output_ids"]) for answer in answers] == [2] * 2000
    assert client.batches("Prefill") - before <= 2000
    for at in rng.sample(range(2000), 30):
        reference.assert_greedy(prompts[at], answers[at]["output_ids"], f"number {at}")
    assert_empty(client)


def test_one_giant_among_dwarfs(client: Client, references: Callable[[str], Reference]) -> None:
    """A prompt that needs nearly all of the KV is neither passed over for ever nor does it stop the small ones."""
    rng, reference = random.Random(42), references("gdn")
    giant, ended = words(rng, 5000), threading.Event()
    dwarfs = [words(rng, rng.randint(10, 60)) for _ in range(40)]
    behind: list[tuple[Prompt, Prompt]] = []

    def stream(seed: int) -> None:
        """Small prompts without end, until the giant has its answer and each client a few of its own."""
        own, asked = random.Random(seed), 0
        while asked < 5 or not ended.is_set():
            prompt = own.choice(dwarfs) + words(own, 5)
            behind.append((prompt, client.generate(prompt, 4)[0]))
            asked += 1

    with ThreadPoolExecutor(7) as pool:
        clients = [pool.submit(stream, seed) for seed in range(6)]
        output = pool.submit(client.generate, giant, 8).result(PATIENCE_S)[0]
        ended.set()
        for each in clients:
            each.result(PATIENCE_S)
    reference.assert_greedy(giant, output, "the giant")
    for prompt, dwarf in rng.sample(behind, 20):
        reference.assert_greedy(prompt, dwarf)
    assert_empty(client)


def test_a_hundred_equal_prompts_at_once(client: Client, references: Callable[[str], Reference]) -> None:
    reference, prompt = references("gdn"), words(random.Random(43), 700)
    answers = together(client, [prompt] * 100, 4)
    for answer in answers:
        reference.assert_same(prompt, answers[0]["output_ids"], answer["output_ids"])
    reference.assert_greedy(prompt, answers[0]["output_ids"])
    late = [answer["meta_info"]["cached_tokens"] for answer in answers[16:]]
    assert late == [640] * len(late)  # of 700, down to the checkpoint grid; the first two batches ran side by side
    assert_empty(client)


class Slow:
    """A client with a tiny window that stops reading in mid-stream."""

    def __init__(self, client: Client, prompt: Prompt, tokens: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", client.server.port))
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        self.socket.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        self.read = self.socket.recv(100)

    def rest(self) -> dict[str, Any]:
        """The last event of the stream."""
        while more := self.socket.recv(1 << 16):
            self.read += more
        self.socket.close()
        events = re.findall(rb"^data: (\{.*\})\r?$", self.read, re.MULTILINE)
        last: dict[str, Any] = json.loads(events[-1])
        return last


def test_slow_readers_hold_up_nobody(client: Client, references: Callable[[str], Reference]) -> None:
    rng, reference = random.Random(44), references("gdn")
    prompts = [words(rng, 100) for _ in range(12)]
    slow = [Slow(client, prompt, 150) for prompt in prompts]
    for _ in range(10):
        prompt = words(rng, 200)
        reference.assert_greedy(prompt, client.generate(prompt, 4)[0])
    for prompt, reader in zip(prompts, slow, strict=True):
        last = reader.rest()
        assert len(last["output_ids"]) == 150
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        reference.assert_greedy(prompt, last["output_ids"])
    assert_empty(client)


def test_clients_that_hang_up_in_hundreds(client: Client, references: Callable[[str], Reference]) -> None:
    """While they wait, while they are computed, and while they are answered."""
    rng, reference = random.Random(45), references("gdn")
    shared = words(rng, 400)
    for wave in range(4):
        seen = client.batches("Prefill")
        rude = [client.asked((shared if n % 2 else []) + words(rng, rng.choice((20, 300)))) for n in range(50)]
        if wave % 2:
            assert eventually(lambda seen=seen: client.batches("Prefill") > seen, 0.02)
        for connection in rude:
            connection.close()
    prompt = shared + words(rng, 30)
    reference.assert_greedy(prompt, client.generate(prompt)[0])
    assert_empty(client)


def test_weights_change_when_nobody_runs(
    client: Client, models: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    """Right after clients hung up, their requests are still in the scheduler."""
    rng, reference = random.Random(47), references("gdn")
    folder = str(models("gdn"))
    for wave in range(6):
        seen = client.batches("Prefill")
        rude = [client.asked(words(rng, rng.choice((20, 3000)))) for _ in range(4)]
        if wave % 2:
            assert eventually(lambda seen=seen: client.batches("Prefill") > seen, 0.02)
        for connection in rude:
            connection.close()
        assert client.post("/update_weights_from_disk", {"model_path": folder})["success"]
        prompt = words(rng, 200)
        output, hit = client.generate(prompt, 4)
        reference.assert_greedy(prompt, output)
        assert hit == 0
    assert_empty(client)


def test_a_storm_of_retries(client: Client, references: Callable[[str], Reference]) -> None:
    """Clients that give up after a blink and ask again: those of before are gone, and the last gets its answer."""
    rng, reference = random.Random(46), references("gdn")
    prompts = [words(rng, rng.randint(200, 900)) for _ in range(12)]

    def insist(prompt: Prompt) -> Prompt:
        for wait_s in (0.01, 0.02, 0.05, 0.1, 0.2):
            try:
                return client.generate(prompt, 8, timeout=wait_s)[0]
            except OSError:
                continue
        return client.generate(prompt, 8)[0]

    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(insist, prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.assert_greedy(prompt, output)
    assert_empty(client)
