"""The `sglang-hybrid` command and the benchmark client: dispatch, exit status, messages."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys

import pytest

from sglang_hybrid import __version__, cli
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.doctor import installation
from sglang_hybrid.engine.surface import check
from sglang_hybrid.engine.surface.rows import EVERY, IMPORT, Use


def test_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    usage = capsys.readouterr().out
    assert all(f"\n  {command} " in usage for command in cli.COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["walk"]) == 2
    assert capsys.readouterr().err.endswith("spec, doctor: walk\n")
    for typed, meant in (("serv", "serve"), ("simulte", "simulate"), ("--spec", "spec")):
        assert cli.main([typed]) == 2
        assert capsys.readouterr().err == f"error: no such command; did you mean {meant}?: {typed}\n"


def helps() -> list[list[str]]:
    named = ("simulate", "replay", "spec", "doctor")
    return [[c, "--help"] for c in named] + [["help", c] for c in named] + [[c, "-h"] for c in named]


@pytest.mark.parametrize("arguments", helps(), ids=" ".join)
def test_every_command_has_a_help_with_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    command = next(word for word in arguments if word.isalpha() and word != "help")
    assert shown.startswith(f"usage: sglang-hybrid {command}")
    assert f"example:\n  sglang-hybrid {command} " in shown


def test_help_and_version_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help"]) == cli.main(["--help"]) == cli.main(["-h"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("usage: sglang-hybrid COMMAND") == shown.count("example: ") == 3
    assert cli.main(["version"]) == cli.main(["--version"]) == cli.main(["-V"]) == 0
    assert set(capsys.readouterr().out.split()) == {__version__}
    assert cli.main(["help", "serf"]) == 2


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_hybrid", "--version"], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


def test_spec_shows_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["spec", "marconi-7b"]) == 0
    shown = capsys.readouterr().out
    assert "65,536 bytes" in shown
    assert "26,787,840 bytes" in shown
    assert cli.main(["spec", "no/such"]) == 2
    assert cli.main(["spec"]) == 2


def test_doctor_finds_nothing_wrong_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0, capsys.readouterr().out
    assert f"{importlib.metadata.version('sglang')}, all that is used of it is there" in capsys.readouterr().out


def test_doctor_reads_a_list_of_plugins_as_sglang_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another, sglang_hybrid")
    assert installation._entry_points().problem is None


def test_doctor_names_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "USES", (Use("gone:name", IMPORT, "cache.build", EVERY),))
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert f"install sglang=={compat.PRIMARY}: sglang.gone:name" in shown
    assert "SGLANG_PLUGINS must name sglang_hybrid: another" in shown
    assert "install util-linux" in shown


def test_findings_read_as_one_line() -> None:
    assert str(installation.Finding("memory", "1 GB", "buy more")) == (
        "PROBLEM  memory             1 GB\n         -> buy more"
    )


HELPS = """
import runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print("ended with", ended.code)
"""


def test_bench_serving_is_sglangs_benchmark() -> None:
    """Same flags: the help of ours is the help of SGLang's. In one process, whose imports take most of the time."""
    command = [sys.executable, "-c", HELPS, "sglang_hybrid.bench_serving", "sglang.benchmark.serving"]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment, check=True)
    ours, theirs, rest = done.stdout.split("ended with 0\n")
    assert ours.split("options:", 1)[1] == theirs.split("options:", 1)[1]
    assert "--dataset-name" in theirs
    assert rest == ""


def test_who_reads_the_help_may_leave_before_its_end() -> None:
    code = "import sys; from sglang_hybrid.launch_server import main; sys.exit(main(['--help']))"
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", code], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert done.returncode == 0, done.stderr
    assert "BrokenPipe" not in done.stderr
