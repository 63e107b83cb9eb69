"""Simulated days of two ranks, and days with a fault put in, which has to be found."""

from __future__ import annotations

import pytest

from tests.simulation.process import ROWS, SMALL, Models, run, simulate

pytestmark = pytest.mark.slow


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
