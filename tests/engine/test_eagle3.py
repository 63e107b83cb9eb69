"""A draft of EAGLE-3, which reads hidden states of some of a hybrid target's layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine import eagle3
from tests.engine.prompts import OVERLAP, TREE, prompts
from tests.engine.support import PATIENCE_S, Client, Reference
from tests.engine.test_speculation import CHUNKS, TRACK, converse

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "a chain, host tier": (0, (*CHUNKS, "--enable-hierarchical-cache")),
    "a tree, overlap, few tokens": (64, (*TREE, *OVERLAP, "--mamba-track-interval", str(TRACK))),
}
"""Tokens that the draft knows, 0 for all, and flags."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eagle3")
    return eagle3.calm_target(root / "target", model.build(root / "gdn", "gdn"))


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> Iterator[Client]:
    vocabulary, flags = WAYS[request.param]
    draft = eagle3.draft(tmp_path / "draft", target, vocabulary)
    asked = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft), *flags)
    server = Server(target, asked, log=tmp_path / "log")
    try:
        server.wait_ready(PATIENCE_S)
        yield Client(server)
    finally:
        server.stop()


def test_a_draft_that_reads_hidden_states(client: Client, target: Path) -> None:
    reference = Reference(target)
    resumed, at_once = converse(client, reference, seed=71)
    assert resumed >= 5
    assert at_once > 1.2
    batch = prompts(72, 12)
    for prompt, (output, _) in zip(batch, client.generate_all(batch, tokens=66), strict=True):
        reference.assert_greedy(prompt, output, "many at once,")
