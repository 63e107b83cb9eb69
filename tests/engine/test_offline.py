"""`sglang_hybrid.Engine`: a script of a user's, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
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


LOST = """
import asyncio, contextlib, os, signal, subprocess, sys, threading, time
import psutil
import sglang_hybrid

LONG = {"max_new_tokens": 20000, "temperature": 0, "ignore_eos": True}
ids = list(range(3, 53))

def sglangs():
    found = {}
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[" ".join(each.cmdline())] = each
    return {title: each for title, each in found.items() if "sglang::" in title}

def kill(name):
    next(process for title, process in sglangs().items() if name in title).kill()

def tell(what, call):
    try:
        print(what, "answered", bool(call()), flush=True)
    except sglang_hybrid.EngineDied as error:
        print(what, "raised", error, flush=True)

def while_it_runs(name):
    threading.Timer(1, kill, [name]).start()

def start():
    return sglang_hybrid.Engine(model_path=sys.argv[1], max_running_requests=4)

def streamed(engine):
    return [chunk for chunk in engine.generate(input_ids=ids, sampling_params=LONG, stream=True)]

async def gathered(engine):
    calls = (engine.async_generate(input_ids=ids, sampling_params=LONG) for _ in range(3))
    kinds = {type(each) for each in await asyncio.gather(*calls, return_exceptions=True)}
    assert kinds == {sglang_hybrid.EngineDied}, kinds
    raise sglang_hybrid.EngineDied("in all of them")

if __name__ == "__main__":
    mine = subprocess.Popen(["sleep", "3600"], start_new_session=True, stdout=-3, stderr=-3)  # /dev/null
    short = {**LONG, "max_new_tokens": 4}
    engine = start()
    while_it_runs("scheduler")
    tell("a call", lambda: streamed(engine))
    tell("a later call", lambda: engine.generate(input_ids=ids, sampling_params=LONG))
    print("left", sorted(sglangs()), flush=True)

    other = start()
    engine.shutdown()
    tell("another engine", lambda: other.generate(input_ids=ids, sampling_params=short))
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        tell("after Ctrl-C", lambda: other.generate(input_ids=ids, sampling_params=short))
    kill("detokenizer")
    tell("idle", lambda: other.generate(input_ids=ids, sampling_params=LONG))

    third = start()
    while_it_runs("detokenizer")
    tell("calls at once", lambda: asyncio.run(gathered(third)))
    third.shutdown()
    print("left", sorted(sglangs()), mine.poll(), flush=True)
    mine.kill()
    mine.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    print("SIGTERM was not heard")
"""


def test_a_script_outlives_its_engines(models: Callable[[str], Path], tmp_path: Path) -> None:
    """SGLang's kills the script with its own process, or the next call waits for ever."""
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    command = [sys.executable, script, models("gdn")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, start_new_session=True, check=False
    )
    assert done.returncode == -signal.SIGTERM, done.stdout + done.stderr
    told = done.stdout.splitlines()
    died = "raised a process of the engine died, and it has ended; make another."
    killed = f"{died} The operating system killed {{}}, most often for memory: lower"
    expected = [
        f"a call {killed.format('scheduler_0')}",
        f"a later call {killed.format('scheduler_0')}",
        "left []",
        "another engine answered True",
        "after Ctrl-C answered True",
        f"idle {killed.format('detokenizer')}",
        "calls at once raised in all of them",
        "left [] None",
    ]
    assert len(told) == len(expected), done.stdout + done.stderr
    for line, start in zip(told, expected, strict=True):
        assert line.startswith(start), done.stdout
    named = str(tmp_path)
    left = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == named]
    psutil.wait_procs(left, timeout=PATIENCE_S)
    assert [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []


REPLICAS = """
import sglang_hybrid, sys

if __name__ == "__main__":
    engine = sglang_hybrid.Engine(model_path=sys.argv[1], dp_size=2, max_running_requests=4)
    for _ in range(6):
        answer = engine.generate(input_ids=list(range(3, 203)), sampling_params={"max_new_tokens": 2})
        print("rank", answer["meta_info"]["dp_rank"], flush=True)
    engine.shutdown()
"""


def test_replicas_of_an_engine_keep_their_conversations(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Their controller is spawned, as that of a server on a GPU is, and SGLang loads no plugins there."""
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS)
    done = subprocess.run(
        [sys.executable, script, models("gdn")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
        env={**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"},
        check=False,
    )
    ranks = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(ranks) == 6, done.stdout + done.stderr
    assert len(set(ranks[2:])) == 1, ranks  # the second request may come before the first one's load is known


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
