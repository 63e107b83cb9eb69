"""`sglang-hybrid doctor --url`: the cache and the elastic memory of a running server, or why they cannot be shown."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang_hybrid import cli
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.doctor.status import ADVICE
from sglang_hybrid.engine.pools import telemetry
from sglang_hybrid.memory.sizing import KV, STATE
from sglang_hybrid.prefix.misses import REASONS
from tests.unit.engine.pools.arenas import opened


class Pages(BaseHTTPRequestHandler):
    """Answers /metrics with `text`; 404 while it is None."""

    text: str | None = None

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" and Pages.text is not None else 404)
        self.end_headers()
        self.wfile.write((Pages.text or "").encode())

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def page() -> str:
    """The metrics of an arena that holds three states and a hundred tokens."""
    arena, driver = opened(HostDriver, lambda: 0.0, page_tokens=1, total_bytes=1 << 20)
    arena.supplies[STATE].take(3)
    arena.supplies[KV].take(100)
    arena.sort()
    found = telemetry.figures(arena, Counter(memory_waits=7, memory_evicted_kv=1, memory_evicted_state=2))
    arena.pooled.close()
    driver.close()
    registry = CollectorRegistry()
    telemetry.exporter({"model_name": "models/a{b}", "tp_rank": "0"}, registry)(found)
    return "other_metric 3.0\n" + generate_latest(registry).decode()


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["doctor", *arguments])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_it_shows_who_has_the_memory(capsys: pytest.CaptureFixture[str], url: str, page: str) -> None:
    Pages.text = page
    status, shown = doctor(capsys, "--url", url)
    assert status == 0
    lines = {line[9:27].strip(): line[28:] for line in shown.splitlines()}
    assert {"budget", "KV", "states", "resident", "map", "unmap", "transfers", "high-water marks"} <= set(lines)
    assert lines["waits"].startswith("7 times")
    assert lines["reclaimed"].startswith("0 times")
    assert "2 evictions" in lines["states"]
    assert "1 evictions" in lines["KV"]
    assert not lines["map"].startswith("0 calls")


def test_a_failed_mapping_is_a_problem_with_a_remedy(capsys: pytest.CaptureFixture[str], url: str, page: str) -> None:
    Pages.text = re.sub(r'(failures_total{kind="map",.*} )0', r"\g<1>3", page)
    status, shown = doctor(capsys, "--url", url)
    assert status == 1
    assert "3 failed" in shown
    assert "lower the budget, or free memory" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "start it with --enable-metrics"), ("other_metric 3.0\n", "these are not the metrics of SGLang")],
)
def test_a_server_that_has_nothing_to_show(
    capsys: pytest.CaptureFixture[str], url: str, text: str | None, said: str
) -> None:
    Pages.text = text
    status, shown = doctor(capsys, "--url", url)
    assert status == 2
    assert said in shown


STATIC = """
sglang:prompt_tokens_total{model_name="a",is_streaming="false"} 500.0
sglang:prompt_tokens_total{model_name="a",is_streaming="true"} 80.0
sglang:cached_tokens_total{cache_source="device",model_name="a"} 145.0
sglang:mamba_cache_miss_tokens_total{reason="never_seen"} 1.0
sglang:mamba_cache_miss_tokens_total{reason="state_evicted"} 3.0
sglang:mamba_cache_miss_tokens_total{reason="disabled"} 0.0
sglang:kv_used_tokens{tp_rank="0"} 10.0
sglang:kv_used_tokens{tp_rank="1"} 10.0
sglang:kv_evictable_tokens{tp_rank="0"} 60.0
sglang:kv_available_tokens{tp_rank="0"} 2000.0
sglang:mamba_used_tokens{tp_rank="0"} 2.0
sglang:mamba_evictable_tokens{tp_rank="0"} 2.0
sglang:mamba_available_tokens{tp_rank="0"} 508.0
"""


def test_a_server_with_static_memory(capsys: pytest.CaptureFixture[str], url: str) -> None:
    Pages.text = STATIC
    status, shown = doctor(capsys, "--url", url)
    assert status == 0
    lines = {line[9:27].strip(): line[28:] for line in shown.splitlines()}
    assert list(lines) == ["hit rate", "state_evicted", "never_seen", "KV", "states"]
    assert lines["hit rate"] == "25.0 % of 580 prompt tokens came from the cache"
    assert lines["state_evicted"].startswith("75.0 % of the missed tokens: more states: --max-mamba-cache-size")
    assert lines["KV"] == "2,070: 10 in use by requests, 60 cached, 2,000 free, when SGLang last counted"
    assert lines["states"] == "512: 2 in use by requests, 2 cached, 508 free, when SGLang last counted"


def test_every_reason_has_its_advice() -> None:
    assert set(ADVICE) == set(REASONS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "http://127.0.0.1:9"), "no server answers there"),
        (("--url", "localhost:30000"), "for example http://127.0.0.1:30000: localhost:30000"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    status, shown = doctor(capsys, *arguments)
    assert status == 2
    assert said in shown


@pytest.mark.parametrize("arguments", [("--url",), ("now",)])
def test_arguments_that_are_none(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor(capsys, *arguments)
    assert arguments[0] in capsys.readouterr().err
