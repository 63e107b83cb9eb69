"""The benchmark's correctness gate closes on wrong and on unsteady results, and every case's inputs are accepted."""

from typing import Any

import pytest
import torch

from benchmarks.kernels.check import gate
from benchmarks.kernels.registry import Case, cases
from sglang_hybrid_kernels import dispatch

CPU = torch.device("cpu")


def case(call: Any, tolerance: float = 1e-3) -> Case:
    return Case("test", "test", lambda *_: {}, call, tolerance, 1)


def by_backend(naive: list[float], triton: list[float]) -> Any:
    return lambda: torch.tensor(naive if dispatch.mode() == "naive" else triton)


@pytest.mark.parametrize(
    ("naive", "triton", "passes"),
    [
        ([1.0, 2.0], [1.0, 2.001], True),
        ([1.0, 2.0], [1.0, 2.01], False),
        ([1.0, 2.0], [1.0, float("nan")], False),
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([0.0, 0.0], [0.0, 1e-9], False),
    ],
)
def test_the_gate_is_red_for_wrong_results(naive: list[float], triton: list[float], passes: bool):
    assert gate(case(by_backend(naive, triton)), CPU)["passed"] is passes


def test_the_gate_is_red_for_results_that_do_not_repeat():
    calls = iter(range(3))
    row = gate(case(lambda: torch.tensor([1.0 + 1e-6 * next(calls)])), CPU)
    assert row["error"] < 1e-3
    assert not row["same_bits"]
    assert not row["passed"]


def test_every_operation_has_cases_and_their_names_are_different():
    assert {case.operation for case in cases()} == set(dispatch.operations())
    names = [(case.operation, case.name) for case in cases()]
    assert len(set(names)) == len(names)
    assert all(case.moved_bytes > 0 and case.flops >= 0 for case in cases())


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("operation", dispatch.operations())
def test_a_case_runs_on_the_naive_path(operation: str):
    first = cases(operation)[0]
    row = gate(first, CPU, small=True, checked="naive")
    assert row["error"] == 0.0
    assert row["same_bits"]
