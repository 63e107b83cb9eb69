"""Simulated days: whatever clients do, every request is answered, in order, rightly, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--max-mamba-cache-size", "24", "--max-total-tokens", "3072", "--chunked-prefill-size", "256")
ROWS = ("--max-running-requests", "6")
ELASTIC = ("--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.006", "--chunked-prefill-size", "256")

ROOT = Path(__file__).parents[2]
Models = Callable[[str], Path]


def run(model: Path, seed: int, hours: int, flags: tuple[str, ...], *options: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: SGLang's settings and hooks are those of a process."""
    command = [
        sys.executable,
        "-m",
        "tests.simulation.day",
        "--model",
        str(model),
        "--seed",
        str(seed),
        "--hours",
        str(hours),
    ]
    return subprocess.run([*command, *options, "--", *flags], capture_output=True, text=True, timeout=900, cwd=ROOT)


def simulate(*given: Any) -> list[dict[str, Any]]:
    """What each rank saw of a day; fails with the violation if there was one."""
    done = run(*given)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize(
    ("preset", "seed", "flags"),
    [
        ("gdn", 11, SMALL),
        ("gdn", 12, (*SMALL, "--page-size", "64", "--hybrid-eviction", "marconi")),
        ("gdn", 13, (*SMALL, "--mamba-radix-cache-strategy", "no_buffer", "--enable-priority-scheduling")),
        ("gdn", 14, (*SMALL, "--schedule-policy", "lpm", "--hybrid-eviction", "lru")),
        ("gdn", 15, ELASTIC),
        ("mamba2", 16, SMALL),
    ],
)
def test_a_day_of_any_load_is_served(models: Models, preset: str, seed: int, flags: tuple[str, ...]) -> None:
    [result] = simulate(models(preset), seed, 3, (*flags, *ROWS), "--preset", preset)
    assert result["hit_tokens"] > 0
    assert result["counts"]["states_evicted"] > 0


def test_two_ranks_run_the_same_batches(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    first, second = simulate(models("gdn"), 17, 3, (*SMALL, *ROWS), "--ranks", "2")
    assert first["hit_tokens"] == second["hit_tokens"] > 0
    assert first["stamps"] == second["stamps"] > 10


@pytest.mark.parametrize(
    ("fault", "shape", "ranks", "found"),
    [
        ("slots set aside", "burst", 1, "nobody runs"),
        ("time stands still", "scan", 2, "time stands still"),
        ("state of another position", "documents", 1, "WrongState"),
    ],
)
def test_a_fault_that_is_put_in_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, fault: str, shape: str, ranks: int, found: str
) -> None:
    if ranks > 1:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    options = ("--ranks", str(ranks), "--shapes", shape, "--fault", fault)
    done = run(models("gdn"), 1, 6, (*SMALL, *ROWS), *options)
    assert done.returncode == 1, done.stderr[-3000:]
    assert found in done.stderr[done.stderr.rindex("violation: ") :]
