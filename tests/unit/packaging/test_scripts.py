"""A script that is asked what it does says so, and does nothing; nor does one that is asked for what it cannot do."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from sglang_hybrid.demo import quickstart

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.parametrize("name", ["setup", "quickstart", "test", "bench", "compile", "check"])
def test_help_installs_nothing(name: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = subprocess.run(
        [SCRIPTS / name, "--help"],
        cwd=tmp_path,
        env=os.environ | {"SGLANG_HYBRID_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    first, *_ = (line for line in (SCRIPTS / name).read_text().splitlines() if line.startswith("# "))
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == first.removeprefix("# ")
    assert not venv.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("quickstart --bogus", "unknown argument, see --help: --bogus"),
        ("quickstart --once --json a.json extra", "unknown argument, see --help: extra"),
        ("quickstart --port", "a value is missing: --port"),
        ("bench --bogus", "name an area, serving, sim, memory or kernels: --bogus"),
        ("bench", "name an area, serving, sim, memory or kernels: none"),
        ("setup --bogus", "unknown argument: --bogus"),
        ("compile --bogus", "unknown argument: --bogus"),
    ],
)
def test_a_mistake_installs_nothing(line: str, said: str, tmp_path: Path) -> None:
    name, *arguments = line.split()
    venv = tmp_path / "venv"
    done = subprocess.run(
        [SCRIPTS / name, *arguments],
        env=os.environ | {"SGLANG_HYBRID_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{name}: {said}\n"
    assert not venv.exists()


def test_quickstart_takes_before_the_setup_what_its_parser_takes_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    script = (SCRIPTS / "quickstart").read_text()
    (usage,) = re.findall(r"(?m)^#   scripts/quickstart (.*)", script)
    patterns = re.findall(r"(?m)^ +(--[^)]*)\)", script)
    with pytest.raises(SystemExit):
        quickstart.main(["--help"])
    parsed, shown, checked = (
        set(re.findall(r"--[a-z]+", text)) for text in (capsys.readouterr().out, usage, " ".join(patterns))
    )
    assert parsed - {"--help"} == shown == checked
