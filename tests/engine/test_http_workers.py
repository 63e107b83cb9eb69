"""With `--tokenizer-worker-num` several processes serve HTTP: each has every hook.

That none serves without is tested in tests/unit/engine/frontend/test_workers.py.
"""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine import compat
from tests.engine.support import PATIENCE_S, Client, eventually
from tests.engine.test_lifecycle import children, files_of, survivors

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ACTIVE = "sglang-hybrid is active in HTTP worker"
SEGMENTS = ("--hybrid-segments", "on", "--hybrid-segment-memory-gb", "0.1") if compat.complete() else ()
WORKERS = ("--tokenizer-worker-num", "2", "--enable-metrics", *SEGMENTS)
PROMETHEUS_2 = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


def names(url: str) -> frozenset[str]:
    """Two series, one of a scheduler and one of all workers, by the names that Prometheus 2 is told."""
    with urllib.request.urlopen(urllib.request.Request(url + "/metrics", headers=PROMETHEUS_2)) as page:
        lines = page.read().decode().splitlines()
    return frozenset(re.findall(r"^sglang\W(?:mamba_cache_miss|prompt)_tokens_total", "\n".join(lines), re.MULTILINE))


def test_every_worker_has_the_hooks(models: Callable[[str], Path], tmp_path: Path) -> None:
    prompt = list(range(3, 203))
    with Server(models("gdn"), WORKERS, log=tmp_path / "server.log") as server:
        server.wait_ready()
        client = Client(server)
        # One that is up answers for the other, which may be a while behind it on a busy machine.
        assert eventually(lambda: server.log.read_text().count(ACTIVE) == 2)
        answers: Counter[tuple[str, object]] = Counter()
        sampling = {"max_new_tokens": 2}
        for _ in range(16):  # a connection each: the kernel gives them to either worker
            bad = {"input_ids": prompt, "sampling_params": {**sampling, "custom_params": {"cache_boundaries": [999]}}}
            answers["boundary", client.answer("/generate", bad)[0]] += 1
            answers["id", client.answer("/generate", {"input_ids": [10**6], "sampling_params": sampling})[0]] += 1
            lines = {"input_ids": prompt, "rid": "x\n[2030-01-01] forged", "sampling_params": sampling}
            answers["name", client.answer("/generate", lines)[0]] += 1
            usage = client.post("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 2})["usage"]
            details = usage["prompt_tokens_details"]
            missed = sum(details["miss_tokens"].values())
            answers["usage", details["cached_tokens"] + missed == usage["prompt_tokens"]] += 1
            streamed = {"input_ids": prompt, "stream": True, "sampling_params": {**sampling, "n": 3}}
            answers["stream", client.answer("/generate", streamed)[0]] += 1
            answers["metrics", names(server.url)] += 1
            if SEGMENTS:
                made = client.post("/hybrid/segments", {"segments": [list(range(3, 103))]})["segments"]
                listed = json.loads(client.get("/hybrid/segments"))
                answers["segments", made[0]["kept"] and listed["segments"][0]["key"] == made[0]["key"]] += 1
                dropped = json.loads(client.answer("/hybrid/segments", method="DELETE")[1])["dropped"]
                answers["dropped", dropped == [made[0]["key"]]] += 1
        seen = frozenset({"sglang:mamba_cache_miss_tokens_total", "sglang:prompt_tokens_total"})
        wanted = {"metrics": seen, "boundary": 400, "id": 400, "name": 400, "usage": True, "stream": 200}
        wanted |= {"segments": True, "dropped": True} if SEGMENTS else {}
        assert dict(answers) == dict.fromkeys(wanted.items(), 16)
        assert "forged" not in server.log.read_text().replace(r"\n[2030-01-01] forged", "")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(900) == 0


def test_workers_that_are_told_to_stop_as_they_start_end(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Before SGLang's own first request, for whose answer they would wait; nobody gives it any more."""
    with Server(models("gdn"), WORKERS, log=tmp_path / "server.log") as server:
        assert eventually(lambda: ACTIVE in server.log.read_text(), every_s=0.05)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(100) is not None


def test_a_long_answer_of_one_worker_is_waited_for(models: Callable[[str], Path], tmp_path: Path) -> None:
    """The other worker has nothing to wait for. SGLang's then ends the scheduler under both."""
    sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    body = {"input_ids": [5] * 40, "stream": True, "sampling_params": sampling}
    with Server(models("gdn"), WORKERS, log=tmp_path / "server.log") as server:
        server.wait_ready()
        assert eventually(lambda: server.log.read_text().count(ACTIVE) == 2)
        with Client(server).open("/generate", json.dumps(body).encode(), PATIENCE_S) as answer:
            assert b"data: {" in answer.readline(), "it has begun to answer"
            server.process.send_signal(signal.SIGTERM)
            last = answer.read().decode().split("\n\n")[-3]
        assert json.loads(last.removeprefix("data: "))["meta_info"]["completion_tokens"] == 1500
        assert server.process.wait(PATIENCE_S) == 0


def test_a_server_of_workers_ends_when_its_scheduler_died(models: Callable[[str], Path], tmp_path: Path) -> None:
    with Server(models("gdn"), WORKERS, log=tmp_path / "server.log") as server:
        server.wait_ready()
        family = children(server)
        files = files_of([*family, psutil.Process(server.process.pid)])
        next(process for process in family if "scheduler" in process.name()).kill()
        assert server.process.wait(PATIENCE_S) == 1
        assert survivors(family) == []
        assert [file for file in files if Path(file).exists()] == []
