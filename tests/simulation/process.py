"""A simulated day in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = ("--max-mamba-cache-size", "24", "--max-total-tokens", "3072", "--chunked-prefill-size", "256")
ELASTIC = ("--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.006", "--chunked-prefill-size", "256")
ROWS = ("--max-running-requests", "6")

ROOT = Path(__file__).parents[2]
Models = Callable[[str], Path]


def run(model: Path, seed: int, hours: int, flags: tuple[str, ...], *options: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: SGLang's settings and hooks are those of a process."""
    command = [sys.executable, "-m", "tests.simulation.day", "--model", str(model)]
    command += ["--seed", str(seed), "--hours", str(hours)]
    return subprocess.run([*command, *options, "--", *flags], capture_output=True, text=True, timeout=900, cwd=ROOT)


def simulate(*given: Any) -> list[dict[str, Any]]:
    """What each rank saw of a day; fails with the violation if there was one."""
    done = run(*given)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results
