"""The questions to a GPU, rehearsed over the stand-in; what becomes of one that fails, hangs or ends its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.memory import gpu, machine, moving, questions
from benchmarks.memory.questions import ask
from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.device.cuda import CudaDriver

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import os, sys, time
from pathlib import Path
from benchmarks.memory.questions import answer

def ill():
    global well
    well = False
    raise RuntimeError("an illegal address")

well = True
every = {
    "first": lambda: 1,
    "wrong": lambda: 1 / 0,
    "second": lambda: 2,
    "dies": lambda: os._exit(11),
    "third": lambda: 3,
    "ill": ill,
    "fourth": lambda: 4 if well else "on a GPU beyond use",
    "hangs": lambda: time.sleep(600),
    "late": lambda: 5,
}
answer({name: every[name] for name in sys.argv[2:]}, lambda: well, Path(sys.argv[1]))
"""


@pytest.mark.slow  # `scripts/gpu --rehearse` asks them all as well
def test_the_rehearsal_answers_every_question(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.memory.gpu", "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    said = {name: each["result"] for name, each in found["result"].items()}
    assert list(said) == [name for names in gpu.PARTS.values() for name in names]
    assert found["rehearsed"]
    assert found["failed"] == []
    assert (said["alignments"]["8 MiB"], said["alignments"]["38 MiB"]) == ("CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE")
    assert "2 MiB" in said["calls"]
    assert "14 MiB" in said["calls"], "granules that are chosen"
    assert said["thread_without_context"]["free memory, before"] == "CUDA_ERROR_INVALID_CONTEXT"
    assert said["thread_without_context"]["free memory, after"] == "CUDA_SUCCESS"
    assert said["old_bytes"]["recycled: bytes that are not zero"] == 2 << 20
    assert said["old_bytes"]["through a backing: bytes that are not zero"] == 0
    for name in gpu.PARTS["d"]:
        assert said[name]["granules that changed kind"] > 0
        assert said[name]["column more"]["calls"] > 0
        assert (said[name]["NaN read from KV"], said[name]["numbers of somebody else"]) == (0, 0)
        assert said[name]["granules left that nobody needs"] == 0


def test_memory_that_is_not_zeroed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDriver, "zero", lambda self, addresses, size_bytes: None)
    with pytest.raises(InvariantError, match=r"'NaN read from KV': [1-9]"):
        moving.grow_and_shrink(machine.rehearsal(), 150, 16.0, ahead=False)


def test_a_question_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log.jsonl"
    script.write_text(SCRIPT)
    names = ["first", "wrong", "second", "dies", "third", "ill", "fourth", "hangs", "late"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # The third process gets five seconds of the limit, and nothing is begun behind it.
    clock = iter([0.0, 0.0, 0.0, 0.0, 0.0, 95.0, 95.0, 101.0])
    monkeypatch.setattr(questions, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    answers = ask(names, [sys.executable, str(script), str(log)], log, limit_s=100.0)
    assert [answers[name].get("result") for name in ("first", "second", "third", "fourth")] == [1, 2, 3, 4]
    assert answers["wrong"]["failed"].startswith("ZeroDivisionError")
    assert answers["dies"]["failed"] == "ended the process: 11"
    assert answers["ill"]["failed"] == "RuntimeError: an illegal address"
    assert answers["hangs"]["failed"] == "ended the process: the time limit"
    assert answers["late"]["failed"] == "not asked"


def test_a_process_that_cannot_start_is_said(tmp_path: Path) -> None:
    answers = ask(["one", "two"], [sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "log", limit_s=60.0)
    assert answers == {"one": {"failed": "not asked"}, "two": {"failed": "not asked"}}
