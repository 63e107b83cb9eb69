"""`sglang-hybrid cluster`: what the router foretells is what servers serve, whatever the endpoint; servers that die."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.process import free_port
from tests.engine.support import PATIENCE_S, eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = ("--max-mamba-cache-size", "24", "--max-total-tokens", "6144", "--max-running-requests", "2")
WORDS = ("gate", "mill", "code", "baker", "brother", "key", "market", "river", "tower", "ship", "price", "keeper")


class Cluster:
    def __init__(
        self,
        folder: Path,
        scratch: Path,
        *kinds: str,
        flags: tuple[str, ...] = SMALL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = scratch / "out.log"
        self.heard: dict[Path, int] = {}  # characters of its servers' logs that a test has looked at
        command = [sys.executable, "-m", "sglang_hybrid", "cluster", "--model-path", str(folder)]
        command += [*(kinds or ("--servers", "2")), "--port", self.url.rpartition(":")[2], "--logs", str(scratch)]
        command += ["--", *flags]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
            told = urllib.error.HTTPError(error.url, error.code, error.reason, error.headers, io.BytesIO(said))
            told.add_note(said.decode(errors="replace")[:1000])  # a test that fails shows it
            raise told from None
        return json.loads(text) if text[:1] in "[{" else text

    def workers(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self.ask("/workers")
        except (urllib.error.URLError, OSError):
            assert self.process.poll() is None, self.log.read_text()
            return []
        return found

    def number(self, name: str) -> float:
        return float(re.findall(rf"^sglang_hybrid_router_{name} (\S+)$", self.ask("/metrics"), re.M)[0])

    def batches(self) -> int:
        """Of events that the router has heard."""
        return sum(each["events"]["batches"] for each in self.workers() if each["events"])

    def hear(self, before: int) -> None:
        """Wait for the events of a prompt, of which there were `before` batches, until no more of them come."""
        assert eventually(lambda: self.batches() > before), self.workers()
        heard = -1
        while heard != (now := self.batches()):
            heard = now
            time.sleep(0.5)

    def servers(self) -> dict[int, int]:
        """Process ids of the servers by their ports."""
        found = {}
        for line in subprocess.check_output(["ps", "-ww", "-eo", "pid,ppid,args"], text=True).splitlines()[1:]:
            pid, parent, arguments = line.split(None, 2)
            if int(parent) == self.process.pid and "launch_server" in arguments:
                found[int(re.findall(r"--port (\d+)", arguments)[0])] = int(pid)
        return found


@pytest.fixture(scope="module")
def cluster(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(models("gdn"), tmp_path_factory.mktemp("cluster"))
    try:
        joined = [1, 1]  # what was published before a subscription arrives is not heard
        ready = eventually(lambda: [(each["events"] or {}).get("snapshots") for each in made.workers()] == joined)
        assert ready, made.log.read_text()
        yield made
    finally:
        group = made.process.pid
        made.process.send_signal(signal.SIGTERM)
        try:
            made.process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def body_of(endpoint: str, document: str, question: str, model: str) -> dict[str, Any]:
    chat = [{"role": "user", "content": document}, {"role": "user", "content": question}]
    if endpoint == "/generate":
        return {"text": document + question, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    if endpoint == "/v1/completions":
        return {"model": model, "prompt": document + question, "max_tokens": 4, "temperature": 0}
    if endpoint == "/v1/responses":
        return {"model": model, "input": chat, "max_output_tokens": 8}
    tool = {"name": "f", "description": "opens gates", "input_schema": {"type": "object", "properties": {}}}
    more: dict[str, Any] = {"system": "Be short.", "tools": [tool]} if endpoint == "/v1/messages" else {}
    return {"model": model, "messages": chat, "max_tokens": 4, "temperature": 0, **more}


def cached(answer: dict[str, Any]) -> int:
    """Cached tokens, as each endpoint tells of them."""
    if "meta_info" in answer:
        return int(answer["meta_info"]["cached_tokens"])
    usage = answer["usage"]
    for key in ("prompt_tokens_details", "input_tokens_details"):
        if usage.get(key):
            return int(usage[key]["cached_tokens"])
    return int(usage.get("cache_read_input_tokens", 0))


@pytest.mark.parametrize(
    "endpoint", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/generate"]
)
def test_what_the_router_foretells_is_what_is_served(cluster: Cluster, endpoint: str) -> None:
    rng = random.Random(endpoint)
    documents = [text(rng, 110) for _ in range(4)]
    model = cluster.ask("/v1/models")["data"][0]["id"]
    served = 0
    for _ in range(16):
        told, before = cluster.number("foretold_tokens_total"), cluster.batches()
        answer = cluster.ask(endpoint, body_of(endpoint, rng.choice(documents), text(rng, 15), model))
        assert cached(answer) == cluster.number("foretold_tokens_total") - told
        served += cached(answer)
        cluster.hear(before)
    assert served > 2000
    assert cluster.number("unknown_prompts_total") == 0


def test_a_server_that_dies_is_passed_over_and_comes_back(cluster: Cluster) -> None:
    rng, body = random.Random(3), {"sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    servers = cluster.servers()
    assert len(servers) == 2
    port, pid = next(iter(servers.items()))
    os.kill(pid, signal.SIGKILL)
    for _ in range(6):
        assert cluster.ask("/generate", {**body, "text": text(rng, 20)})["meta_info"]["prompt_tokens"] > 0
    assert eventually(lambda: sum(each["healthy"] for each in cluster.workers()) == 2)
    assert cluster.servers()[port] != pid
    assert all(each["running"] == each["waiting_tokens"] == 0 for each in cluster.workers())
    document = text(rng, 120)
    for _ in range(4):  # on whichever: what it held is forgotten
        told, before = cluster.number("foretold_tokens_total"), cluster.batches()
        answer = cluster.ask("/generate", {**body, "text": document + text(rng, 15)})
        assert cached(answer) == cluster.number("foretold_tokens_total") - told
        cluster.hear(before)


def test_nothing_is_left_when_it_stops(models: Callable[[str], Path], tmp_path: Path) -> None:
    made = Cluster(models("gdn"), tmp_path)
    assert eventually(lambda: len(made.servers()) == 2 and bool(made.workers()))
    servers = list(made.servers().values())
    made.process.send_signal(signal.SIGINT)
    assert made.process.wait(PATIENCE_S) == 0, made.log.read_text()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "0"], "one or more: 0"),
        (["--port", "0"], "1 to 65535: 0"),
        (["--", "--port", "3"], "itself; put it before"),
        (["--routing", "best"], "best"),
    ],
)
def test_bad_input_is_answered_in_a_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "sglang_hybrid", "cluster", "--model-path", "x", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert message in done.stderr
