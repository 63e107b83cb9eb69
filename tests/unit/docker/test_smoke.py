"""docker/smoke.py against servers that behave and misbehave."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

SMOKE = Path(__file__).parents[3] / "docker/smoke.py"
METRICS = (
    'sglang:cache_hit_rate{model_name="demo"} 0.5\nsglang:token_usage{} 0\nsglang:num_queue_reqs{} 0\n'
    "sglang:time_to_first_token_seconds_count{} 2\n"
)


class Behaviour:
    """What the server answers; `cached` and `texts` are used up one completion at a time."""

    def __init__(self, health: int = 200, cached: tuple[int | None, ...] = (None, 576), metrics: str = METRICS) -> None:
        self.health = health
        self.cached = list(cached)
        self.texts = ["yes", "yes"]
        self.metrics = metrics
        self.prompts: list[str] = []

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        self.prompts.append(body["messages"][0]["content"])
        cached = self.cached.pop(0)
        details = None if cached is None else {"cached_tokens": cached}
        message = {"role": "assistant", "content": self.texts.pop(0)}
        return {
            "choices": [{"message": message}],
            "usage": {"prompt_tokens": 600, "prompt_tokens_details": details},
        }


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, text: str, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer("", behaviour.health)
            elif self.path == "/metrics":
                self.answer(behaviour.metrics)
            else:
                self.answer(json.dumps({"data": [{"id": "demo"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(json.dumps(behaviour.completion(body)))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def smoke(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SMOKE), "--url", url, *flags], capture_output=True, text=True)


def test_a_good_server_passes_and_the_prompt_is_long_and_repeated() -> None:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        done = smoke(url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo: 0 then 576 of 600 prompt tokens from cache" in done.stdout
    assert "/metrics has 4 series" in done.stdout
    assert len(behaviour.prompts) == 2
    assert behaviour.prompts[0] == behaviour.prompts[1]
    assert len(behaviour.prompts[0].split()) > 512


def test_health_alone_asks_nothing_else() -> None:
    behaviour = Behaviour(cached=())
    with serving(behaviour) as url:
        assert smoke(url, "--health-only").returncode == 0
    assert behaviour.prompts == []


def wrong_text() -> Behaviour:
    behaviour = Behaviour()
    behaviour.texts = ["yes", "no"]
    return behaviour


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(health=503), "did not become healthy"),
        (Behaviour(cached=(0, None)), "was not cached: 0 tokens"),
        (Behaviour(cached=(0, 300)), "was not cached: 300 tokens"),
        (wrong_text(), "the answer changed"),
        (Behaviour(metrics=""), "--enable-metrics: sglang:cache_hit_rate"),
    ],
)
def test_each_fault_is_named_and_fails(behaviour: Behaviour, reason: str) -> None:
    with serving(behaviour) as url:
        done = smoke(url, *(("--timeout", "1") if behaviour.health != 200 else ()))
    assert done.returncode == 1
    assert reason in done.stderr


def test_no_server_at_all_fails() -> None:
    with serving(Behaviour()) as url:
        pass
    done = smoke(url, "--timeout", "0.3")
    assert done.returncode == 1
    assert "did not become healthy" in done.stderr
