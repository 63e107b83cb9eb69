"""Records of a trace: validation and ordering."""

import numpy as np
import pytest

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.sim.trace import Trace, TraceError, TraceRequest, make_request, make_trace


def test_a_request_splits_into_input_and_output() -> None:
    r = make_request([1, 2, 3], [4, 5], 0.5, "s")
    assert r.input_tokens.tolist() == [1, 2, 3]
    assert r.output_tokens.tolist() == [4, 5]
    assert (r.n_input, r.n_output, r.tokens.dtype) == (3, 2, np.int32)


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], [[1]], ["a"], [2**70]])
def test_tokens_out_of_range_or_of_another_type_are_refused(ids: list[object]) -> None:
    with pytest.raises(TraceError, match="token ids must"):
        make_request(ids, [], 0.0, "s")  # type: ignore[arg-type]


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), True, None])
def test_arrivals_are_finite_numbers(ts: object) -> None:
    with pytest.raises(TraceError, match="finite number of seconds"):
        make_request([1], [], ts, "s")  # type: ignore[arg-type]


def test_a_request_without_input_is_refused() -> None:
    with pytest.raises(TraceError, match="at least one input token"):
        make_request([], [1], 0.0, "s")


def test_a_trace_is_sorted_and_starts_at_zero() -> None:
    trace = make_trace("t", [make_request([1], [], 7.0, "b"), make_request([2], [], 5.0, "a")])
    assert [(r.session, r.ts) for r in trace.requests] == [("a", 0.0), ("b", 2.0)]
    assert trace.duration_s == 2.0
    trace.check()


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="holds no request"):
        make_trace("nothing", [])


@pytest.mark.parametrize(
    "request_",
    [
        TraceRequest(np.array([1, 2], dtype=np.int64), 1, 0.0, "s"),  # type: ignore[arg-type]
        TraceRequest(np.array([1, 2], dtype=np.int32), 0, 0.0, "s"),
        TraceRequest(np.array([1, 2], dtype=np.int32), 3, 0.0, "s"),
        TraceRequest(np.array([1, -2], dtype=np.int32), 1, 0.0, "s"),
        TraceRequest(np.array([1], dtype=np.int32), 1, float("nan"), "s"),
    ],
)
def test_check_finds_requests_that_break_the_contract(request_: TraceRequest) -> None:
    with pytest.raises(InvariantError):
        Trace("t", (request_,)).check()


def test_check_finds_a_clock_that_goes_backwards() -> None:
    a, b = make_request([1], [], 1.0, "s"), make_request([1], [], 0.0, "s")
    with pytest.raises(InvariantError, match="sorted by arrival"):
        Trace("t", (a, b)).check()
