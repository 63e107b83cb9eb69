"""SGLang's benchmark client through our entry point, against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.support import PATIENCE_S, Client

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat"])
def test_it_measures_a_server_and_says_why_tokens_missed(
    serve: Callable[..., Client], models: Callable[[str], Path], tmp_path: Path, backend: str
) -> None:
    server, out = serve("gdn", "--chunked-prefill-size", "128").server, tmp_path / "out.jsonl"
    folder = str(models("gdn"))
    flags = ["--backend", backend, "--host", "127.0.0.1", "--port", str(server.port), "--model", folder]
    load = [
        "--dataset-name",
        "random-ids",
        "--num-prompts",
        "6",
        "--random-input-len",
        "100",
        "--random-output-len",
        "8",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_hybrid.bench_serving", *flags, *load, "--output-file", str(out)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(out.read_text().splitlines()[-1])
    assert result["completed"] == 6
    for key in ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "output_throughput"):
        assert result[key] > 0
    report = result["cache_report"]
    missed = report["miss_tokens"]
    if backend == "sglang":  # SGLang counts the prompts of chats without their template
        assert report["total_cached_tokens"] + sum(missed.values()) == report["total_prompt_tokens"]
    assert missed["never_seen"] > 0
    assert "Cache hit rate:" in done.stdout
    for reason, tokens in missed.items():
        assert f"{reason + ':':<40} {tokens}" in done.stdout
