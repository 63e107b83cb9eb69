"""The speed columns of a case: our call, the roofline and other people's ways to the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.check import SEED, backend, difference, result
from benchmarks.kernels.clock import Clock
from benchmarks.kernels.registry import Case, Prepared

COLUMNS = {
    "floor_us": "the roofline: moved_bytes at copy_gb_per_s or flops at matmul_tflops, the larger",
    "share_of_floor": "floor_us / p50",
    "baselines": "other ways to the same result, or the pass it is added to: their times, and as `differs` the error "
    "of their result against ours where it has the same form; `not available` and the reason where one does not run",
}


def timed(case: Case, clock: Clock, rounds: int, ceiling: dict[str, float], checked: str) -> dict[str, Any]:
    """Times of the case on the backend `checked`, and of each of its baselines."""
    with backend(checked):
        ours = clock.spread(prepared(case, case.call, clock), rounds)
    floor = max(case.moved_bytes / ceiling["copy_gb_per_s"] / 1e3, case.flops / ceiling["matmul_tflops"] / 1e6)
    row = {"moved_bytes": case.moved_bytes, "flops": case.flops, **ours}
    if not clock.small:  # moved_bytes are those of the full size
        row |= {"floor_us": floor, "share_of_floor": round(floor / ours["p50"], 3)}
    wanted = result(case, clock.device, clock.small, checked) if case.baselines else ()
    others = {name: _baseline(case, call, clock, rounds, wanted, checked) for name, call in case.baselines.items()}
    return {**row, "baselines": others}


def prepared(case: Case, call: Callable[..., Any] | Prepared, clock: Clock) -> Callable[[], Any]:
    """What is timed: the call on inputs of its own, ready to run."""
    inputs = case.inputs(clock.device, torch.Generator(clock.device).manual_seed(SEED), clock.small)
    return call.prepare(**inputs) if isinstance(call, Prepared) else lambda: call(**inputs)


def _baseline(
    case: Case, call: Any, clock: Clock, rounds: int, wanted: tuple[Tensor, ...], checked: str
) -> dict[str, Any]:
    try:
        with backend(checked):  # some baselines are made of our operations
            made = prepared(case, call, clock)()
            row = clock.spread(prepared(case, call, clock), rounds)
    except Exception as error:  # someone else's kernel may be absent or refuse these shapes: say so and go on
        return {"not available": f"{type(error).__name__}: {error}"[:300]}
    got = made if isinstance(made, tuple) else (made,)
    alike = all(isinstance(x, Tensor) for x in got) and [x.shape for x in got] == [x.shape for x in wanted]
    return {**row, "differs": max(map(difference, got, wanted))} if alike else row
