"""SGLang's server in Rust over our cache: the answers of transformers, hits, and no request that ends the scheduler."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import rust
from tests.engine.prompts import prompts, words
from tests.engine.support import PATIENCE_S, Client, Reference

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(compat.engine_version() != rust.OLDEST, reason="refused with other versions"),
]


@pytest.fixture(scope="module")
def client(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("rust") / "log"
    flags = ("--max-mamba-cache-size", "40", "--max-total-tokens", "12032", "--max-running-requests", "4")
    with Server(models("gdn"), flags, log=log, environment={rust.VARIABLE: "1"}) as server:
        server.wait_ready(PATIENCE_S)
        yield Client(server)
        assert server.process.poll() is None
        text = log.read_text()
        assert rust.NOTE in text
        assert not re.search("Traceback|leak detected", text)


def test_answers_are_right_and_hit(client: Client, references: Callable[[str], Reference]) -> None:
    batch = prompts(7, 24)
    for answers in (client.generate_all(batch), client.generate_all(batch)):
        for prompt, (answer, _) in zip(batch, answers, strict=True):
            references("gdn").assert_greedy(prompt, answer)
    assert sum(hit > 0 for _, hit in answers) > 20


def test_named_positions_are_resumed_from(client: Client) -> None:
    prompt = words(random.Random(3), 300)
    for named, hit in ((None, 0), ({"cache_boundaries": [128]}, 128)):
        client.flush()
        client.generate(prompt, sampling_params={"max_new_tokens": 2, "custom_params": named})
        assert client.generate([*prompt[:130], *words(random.Random(4), 99)])[1] == hit


def test_tenants_share_nothing(client: Client) -> None:
    prompt = words(random.Random(5), 300)
    hits = [client.generate(prompt, cache_salt=salt)[1] for salt in ("a", "a", "b", "b")]
    assert hits == [0, 256, 0, 256]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"return_logprob": True, "top_logprobs_num": 5000}, "top log-probabilities is a whole number from 0 to 320"),
        ({"extra_key": "k" * 2000}, "extra_key is a text of at most 1024 characters"),
        (
            {"sampling_params": {"custom_params": {"cache_boundaries": "x"}}},
            "cache_boundaries is a list of token positions",
        ),
    ],
)
def test_a_request_that_would_end_the_scheduler_is_refused(client: Client, given: dict[str, Any], message: str) -> None:
    status, text = client.answer("/generate", {"input_ids": [3, 4, 5], **given})
    assert status >= 400
    assert message in text
    assert len(client.generate([3, 4, 5], 4)[0]) == 4


def test_an_id_aborts_no_other_request(client: Client) -> None:
    """A scheduler aborts every request whose id begins with the one that it is told."""
    prompt = words(random.Random(9), 100)
    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(client.generate, [*prompt, at], 120, rid=f"abc{at}") for at in range(3)]
        gone = client.asked(prompt, max_new_tokens=120)
        gone.close()
        client.answer("/abort_request", {"rid": "a"})
        assert [len(each.result()[0]) for each in long] == [120] * 3


def test_clients_that_hang_up_while_they_wait_end_nobody(client: Client) -> None:
    """Four run at once; the others are aborted in the queue, some in their prefill."""
    gone = [client.asked([at + 3] * 900, max_new_tokens=200) for at in range(24)]
    for each in gone:
        time.sleep(0.05)
        each.close()
    client.flush()
    assert len(client.generate([3, 4, 5], 4)[0]) == 4
