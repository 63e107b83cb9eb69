"""`sglang_hybrid.Engine`: a script of a user's, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.support import PATIENCE_S, Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = """
import asyncio, json, sys
import sglang_hybrid

if __name__ == "__main__":
    logs = {"log_level": "info", "log_requests": True, "log_requests_level": 3, "log_requests_format": "json"}
    engine = sglang_hybrid.Engine(model_path=sys.argv[1], hybrid_policy="lru", max_running_requests=4, **logs)
    for _ in range(2):
        answer = engine.generate(
            input_ids=list(range(3, 203)), sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        )
        print("answer", json.dumps(answer))
    try:
        asyncio.run(engine.async_generate(input_ids=[3, 4]))
    except RuntimeError as error:
        print("refused", error)
    engine.shutdown()
"""


def test_a_script_is_served_from_cache_and_its_log_can_be_simulated(
    models: Callable[[str], Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    script = tmp_path / "offline.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, models("gdn")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line.removeprefix("answer ")) for line in done.stdout.splitlines() if "answer {" in line]
    cold, warm = (answer["meta_info"] for answer in answers)
    assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, 192)
    assert cold["cached_tokens_details"]["miss_never_seen"] == 200
    references("gdn").assert_greedy(list(range(3, 203)), answers[0]["output_ids"])
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert "refused an engine answers in the event loop of its first request" in done.stdout

    log, report = tmp_path / "server.log", tmp_path / "report.json"
    log.write_text(done.stderr + done.stdout)
    command = [sys.executable, "-m", "sglang_hybrid", "simulate", log, "--model", models("gdn"), "--json", report]
    subprocess.run([*command, "--capacity-gb", "1", "--policy", "lru"], check=True, timeout=PATIENCE_S)
    (cell,) = (cell for cell in json.loads(report.read_text())["cells"] if cell["policy"] == "lru")
    assert (cell["requests"], cell["input_tokens"]) == (2, 400)
