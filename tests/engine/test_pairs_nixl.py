"""Pairs over NIXL. A file of its own: a thread of NIXL's keeps a core busy as long as a server lives."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.pairs import assert_answers, assert_nothing_is_left, needs, pair, url_of
from tests.engine.prompts import prompts
from tests.engine.support import PATIENCE_S, Reference
from tests.engine.test_cluster import Cluster
from tests.engine.test_pairs import listening

pytestmark = [pytest.mark.engine, pytest.mark.long]

NIXL = ("--disaggregation-transfer-backend", "nixl", "--page-size", "1", "--mamba-radix-cache-strategy", "no_buffer")


@pytest.fixture(scope="module")
def over_nixl(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pair(models("mamba2"), tmp_path_factory.mktemp("nixl"), *NIXL) as made:
        yield made


@needs("nixl")
def test_nixl_hands_over_between_cpus(over_nixl: Cluster, references: Callable[[str], Reference]) -> None:
    assert assert_answers(over_nixl, references("mamba2"), prompts(11, 16)) > 2
    assert_nothing_is_left(over_nixl)


@needs("nixl")
def test_nixl_listens_on_this_machine_alone(over_nixl: Cluster) -> None:
    for role in ("prefill", "decode"):
        url = url_of(over_nixl, role)
        sockets = listening(over_nixl.servers()[int(url.rpartition(":")[2])])
        with urllib.request.urlopen(url + "/server_info", timeout=PATIENCE_S) as answer:
            store = json.loads(answer.read())["nccl_port"]
        assert {port for address, port in sockets if address not in ("127.0.0.1", "::1")} == {store}, "torch's own"
        assert "transfer engine listens" not in (over_nixl.log.parent / f"{role}-0.log").read_text()
