"""A run of the tests that may last only so long skips the rest, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import UNTIL

ROOT = Path(__file__).parents[3]
FEW = "tests/unit/core/test_config_and_process.py"


@pytest.mark.parametrize(("left_s", "said"), [(-1.0, "skipped"), (3600.0, "passed")])
def test_what_has_not_begun_in_time_is_skipped(left_s: float, said: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FEW, "-k", "survives or inline"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {UNTIL: str(time.time() + left_s)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert said in done.stdout.splitlines()[-1]
    assert (f"the time is over: {UNTIL}" in done.stdout) is (left_s < 0)
