"""Other pairs: with KV that servers which decode keep, split over ranks; and servers that change."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine import compat
from tests.engine.pairs import (
    CHECKSUMS,
    FLAGS,
    assert_answers,
    assert_nothing_is_left,
    direct,
    generate,
    held,
    needs,
    pair,
    url_of,
)
from tests.engine.prompts import prompts, words
from tests.engine.support import PATIENCE_S, Client, Reference, eventually
from tests.engine.test_cluster import Cluster

pytestmark = [pytest.mark.engine, pytest.mark.long]

KEPT = ("--disaggregation-decode-enable-radix-cache", "--enable-metrics")


with_kv = pytest.mark.skipif(
    compat.engine_version() != compat.PRIMARY, reason="with other versions a server that decodes keeps KV SGLang's way"
)


@pytest.fixture(scope="module")
def keeping(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pair(models("gdn"), tmp_path_factory.mktemp("keeping"), *KEPT) as made:
        yield made


def sent_mb(made: Cluster) -> float:
    """What the server that prefills has handed over so far."""
    with urllib.request.urlopen(url_of(made, "prefill") + "/metrics", timeout=PATIENCE_S) as answer:
        told = answer.read().decode()
    return sum(map(float, re.findall(r"^sglang:kv_transfer_total_mb_sum\{.*\} (\S+)$", told, re.M)))


@with_kv
@needs("mooncake")
def test_what_a_server_that_decodes_has_is_not_sent_again(
    keeping: Cluster, references: Callable[[str], Reference]
) -> None:
    """Of the second turn only what is new, of a repeated prompt its last page and its state; what counts as cached is
    what the other server had."""
    reference, sent = references("gdn"), []
    prompt = words(random.Random(1), 640)
    for _ in range(3):
        before, told = sent_mb(keeping), keeping.number("foretold_tokens_total")
        heard = keeping.batches()
        answer, hit = generate(keeping, prompt, 100)
        reference.assert_greedy(prompt, answer)
        assert hit == keeping.number("foretold_tokens_total") - told
        assert eventually(lambda before=before: sent_mb(keeping) > before)  # type: ignore[misc]
        sent.append(sent_mb(keeping) - before)
        prompt = [*prompt, *answer, *words(random.Random(len(prompt)), 60)]
        keeping.hear(heard)
    again, told = sent_mb(keeping), keeping.number("foretold_tokens_total")
    assert generate(keeping, prompt[:640], 4)[1] == keeping.number("foretold_tokens_total") - told
    assert eventually(lambda: sent_mb(keeping) > again)
    state = sent_mb(keeping) - again
    assert state < sent[1] < sent[0] / 2
    assert sent[2] < sent[0] / 2
    assert_nothing_is_left(keeping)


@with_kv
@needs("mooncake")
def test_kept_kv_under_load_leaves_nothing_behind(keeping: Cluster, references: Callable[[str], Reference]) -> None:
    assert assert_answers(keeping, references("gdn"), prompts(12, 32), 24) > 5
    assert_nothing_is_left(keeping)
    log = (keeping.log.parent / "decode-0.log").read_text()
    assert "KvCache" in log
    assert "states come from the server that prefills" in log


@needs("mooncake")
def test_ranks_hand_over_to_ranks(
    models: Callable[[str], Path], tmp_path: Path, references: Callable[[str], Reference]
) -> None:
    flags = ("--tp-size", "2", *CHECKSUMS)
    with pair(models("gdn"), tmp_path, *flags, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as made:
        assert assert_answers(made, references("gdn"), prompts(13, 10)) > 1
        assert eventually(lambda: not held(made, time.time() - 1))
        assert_nothing_is_left(made)


class Apart:
    """A server that prefills, one that decodes and a router, each started by itself, on ports that stay."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch, self.bootstrap = folder, scratch, free_port()
        self.ports = {"prefill": free_port(), "decode": free_port()}
        self.running: dict[str, Server] = {}
        self.url = f"http://127.0.0.1:{free_port()}"
        for role in self.ports:
            self.start(role)
        command = [sys.executable, "-m", "sglang_hybrid", "route", "--port", self.url.rpartition(":")[2]]
        for role, port in self.ports.items():
            command += [f"--{role}", f"http://127.0.0.1:{port}"]
        self.router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def start(self, role: str, *flags: str, folder: Path | None = None) -> None:
        given = ("--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(self.bootstrap))
        paged = () if "--page-size" in flags else ("--page-size", "64")
        self.running[role] = Server(
            folder or self.folder, (*given, *paged, *FLAGS, *flags), port=self.ports[role],
            log=self.scratch / f"{role}-{time.monotonic()}.log",
        )  # fmt: skip

    def workers(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self.url + "/workers", timeout=PATIENCE_S) as answer:
                return {each["role"]: each for each in json.loads(answer.read())}
        except OSError:
            return {}

    def well(self) -> bool:
        return [each["healthy"] for each in self.workers().values()] == [True, True]

    def stop(self) -> None:
        self.router.send_signal(signal.SIGINT)
        self.router.wait(PATIENCE_S)
        for server in self.running.values():
            server.stop()


@needs("mooncake")
def test_a_server_that_comes_back_with_other_settings_is_left_out_and_no_harm_is_done(
    models: Callable[[str], Path], tmp_path: Path, references: Callable[[str], Reference]
) -> None:
    reference, prompt = references("gdn"), words(random.Random(2), 150)
    asked = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    apart = Apart(models("gdn"), tmp_path)
    try:
        assert eventually(apart.well), apart.workers()
        status, said = direct(apart.url, asked)
        assert status == 200, said
        for flags, folder, why in (
            (("--page-size", "128"), None, "its --page-size is 128, not 64"),
            ((), models("mamba2"), "another model"),
        ):
            os.killpg(apart.running["prefill"].process.pid, signal.SIGKILL)
            apart.running["prefill"].stop()
            apart.start("prefill", *flags, folder=folder)
            assert eventually(lambda why=why: why in apart.workers()["prefill"]["why"]), apart.workers()  # type: ignore[misc]
            status, said = direct(apart.url, asked)
            assert status == 503
            assert why in said
            if folder is None:  # past the router: the request fails, and the server lives
                room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": apart.bootstrap, "bootstrap_room": 5}
                status, said = direct(apart.running["decode"].url, {**asked, **room})
                assert status == 500, said
                assert psutil.pid_exists(apart.running["decode"].process.pid)
                assert apart.workers()["decode"]["healthy"]
        apart.running["prefill"].stop()
        apart.start("prefill")
        assert eventually(apart.well), apart.workers()
        status, said = direct(apart.url, asked)
        assert status == 200, said
        reference.assert_greedy(prompt, json.loads(said)["output_ids"])
        log = Client(apart.running["decode"]).server.log.read_text()
        assert "does not fit, its requests fail: Page size mismatch" in log
    finally:
        apart.stop()
