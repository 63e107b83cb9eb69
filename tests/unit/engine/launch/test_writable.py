"""A user without a home, and a disk that is read-only: said with the variable to set, before anything is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import writable

COMMANDS = {
    "serve": ("sglang_hybrid.launch_server", "--model-path", "Org/Name", "--port", "31994"),
    "help": ("sglang_hybrid.launch_server", "--help"),
    "bench_serving": ("sglang_hybrid.bench_serving", "--help"),
}


@pytest.fixture
def no_folder(tmp_path: Path) -> str:
    """A folder that nobody can make, root neither."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "cache")


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_the_variable(command: str, no_folder: str) -> None:
    variable = "SGLANG_CACHE_DIR" if compat.at_least("0.5.21") else "TORCHINDUCTOR_CACHE_DIR"
    done = run(*COMMANDS[command], **{variable: no_folder})
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(rf"error: the folder for compiled kernels .* in {variable}: .*\n", done.stderr), done.stderr


def test_doctor_does_not_have_packages_installed_again(no_folder: str) -> None:
    done = run("sglang_hybrid", "doctor", TORCHINDUCTOR_CACHE_DIR=no_folder)
    assert done.returncode == 1
    problems = dict(re.findall(r"^PROBLEM +(\S+).*\n +-> (.*)$", done.stdout, re.MULTILINE))
    assert "TORCHINDUCTOR_CACHE_DIR" in problems["folders"]
    assert problems["sglang"] == "mend the folders first", done.stdout
    assert "pip install --force-reinstall" not in done.stdout


def test_no_temporary_folder(tmp_path: Path) -> None:
    """As on a disk that is read-only, which a test cannot have."""
    (tmp_path / "sitecustomize.py").write_text("import tempfile\ntempfile._candidate_tempdir_list = list\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(*COMMANDS["serve"], PYTHONPATH=path)
    assert done.returncode == 2, done.stderr
    assert re.match(r"error: no temporary folder .* TMPDIR, or mount a volume at /tmp: .*\n$", done.stderr), done.stderr


def test_a_temporary_folder_too_long_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    done = run(*COMMANDS["serve"], TMPDIR=str(folder))
    assert done.returncode == 2, done.stderr
    assert re.match(r"error: sockets lie in .* a folder of up to 95 in TMPDIR: /.*x\n$", done.stderr), done.stderr


def test_a_folder_that_can_be_made_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert writable.problem() is None


def test_without_sglang_doctor_still_reports(tmp_path: Path) -> None:
    """A folder without its files, as an interrupted pip leaves it, stands before the whole one."""
    (tmp_path / f"sglang-{compat.PRIMARY}.dist-info").mkdir()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("sglang_hybrid", "doctor", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"^PROBLEM +sglang +missing\n +-> .*pip install --no-deps sglang==", done.stdout, re.MULTILINE)
