"""A script that is asked what it does says so, and does nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

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
