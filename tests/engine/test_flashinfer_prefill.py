"""Hopper's default prefill, by a stand-in for its kernel: branch and tail of one pass are saved, no token is wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_hybrid.demo.server import Server
from tests.engine.prompts import prompts, words
from tests.engine.support import PATIENCE_S, Client, Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STAND_IN = Path(__file__).parent / "flashinfer"
CHUNK = ("--chunked-prefill-size", "512")  # a pass has several checkpoints


@pytest.fixture(scope="module", params=["extra_buffer", "no_buffer"])
def client(
    request: pytest.FixtureRequest, models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    path = os.pathsep.join(filter(None, (str(STAND_IN), os.environ.get("PYTHONPATH", ""))))
    log = tmp_path_factory.mktemp("flashinfer") / "server.log"
    flags = (*CHUNK, "--mamba-radix-cache-strategy", request.param)
    with Server(models("gdn"), flags, log=log, environment={"PYTHONPATH": path}) as server:
        server.wait_ready(PATIENCE_S)
        assert "a state every 64 tokens, from FlashInfer's checkpoints" in log.read_text()
        yield Client(server)
        assert "Traceback" not in log.read_text()


def test_branch_and_tail(client: Client, references: Callable[[str], Reference]) -> None:
    rng, reference = random.Random(31), references("gdn")
    shared = words(rng, 320)
    asked = [shared + words(rng, 100) for _ in range(3)]
    answers = [client.generate(prompt, 8) for prompt in asked]
    assert answers[2][1] == 320, "the third resumes at the branch, which the second saved inside its prefill"
    for prompt, (output, _) in zip(asked, answers, strict=True):
        reference.assert_greedy(prompt, output)


def test_random_prompts_side_by_side(client: Client, references: Callable[[str], Reference]) -> None:
    batch = prompts(seed=32, count=40)
    answers = client.generate_all(batch, at_once=4)
    assert sum(hit > 0 for _, hit in answers) > 5
    for prompt, (output, _) in zip(batch, answers, strict=True):
        references("gdn").assert_greedy(prompt, output)
