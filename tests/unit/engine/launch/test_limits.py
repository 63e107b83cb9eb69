"""What a start is refused for, before it is halfway."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_hybrid.core import process
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import early, limits
from tests.unit.engine.launch.test_early import LAUNCH


def with_files(soft: int, hard: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that may open so many files."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        preexec_fn=lower,
    )


def test_too_few_files_are_said_before_anything_is_imported() -> None:
    done = with_files(64, 64, LAUNCH, "--model-path", "Org/Name", "--port", "31993")
    assert done.stderr.startswith("error: a server opens more files than may be open here, at least 128")
    assert done.stderr.endswith(": 64\n")
    assert done.stdout == "2 []\n"


def test_too_few_threads_are_said_with_the_limits_that_give_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start ended in the middle, with "Resource temporarily unavailable" or a hint at memory."""
    start, before, left = threading.Thread.start, threading.active_count(), [25]

    def limited(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ConfigError, match=r"ulimit -Hu, TasksMax= of systemd, .*: 25$"):
        limits.check(early.read([]))
    assert threading.active_count() == before, "those that were tried have ended"
    left[0] = 1000
    limits.check(early.read([]))
    left[0] = 0
    limits.check(None)  # nothing is started


@pytest.mark.parametrize(("soft", "hard", "most"), [(64, 1000, 1000), (300, 300, 300)])
def test_as_many_files_as_may_be_had(soft: int, hard: int, most: int) -> None:
    code = (
        "import resource; from sglang_hybrid.core import process\n"
        "print(process.allow_files(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert with_files(soft, hard, code).stdout == f"{most} ({most}, {hard})\n"


def test_no_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    endless = resource.RLIM_INFINITY
    for now, expected in (((1024, endless), [(65_535, endless)]), ((endless, endless), [])):
        asked.clear()
        monkeypatch.setattr(process.resource, "getrlimit", lambda _, now=now: now)
        monkeypatch.setattr(process.resource, "setrlimit", lambda _, values: asked.append(values))
        assert process.allow_files() == 65_535
        assert asked == expected


def test_shared_memory(tmp_path: Path) -> None:
    limits.check_shared_memory(1, tmp_path)
    with pytest.raises(ConfigError, match=r"at least 1000000000000000 MB.*--shm-size 1g\): [\d.]+ MB are free"):
        limits.check_shared_memory(10**21, tmp_path)
    with pytest.raises(ConfigError, match=r"mount it \(No such file or directory\): .*/absent"):
        limits.check_shared_memory(1, tmp_path / "absent")
