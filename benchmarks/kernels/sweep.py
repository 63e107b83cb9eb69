"""Warps and stages tried one after the other: whether a kernel's constants suit this GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from benchmarks.kernels.check import backend, difference, result
from benchmarks.kernels.clock import Clock
from benchmarks.kernels.registry import Case
from benchmarks.kernels.timing import prepared

KERNELS = {
    "compose": "compose_kernel",
    "chunk_h_jump": "chunk_h_jump_kernel",
    "state_at": "walk_kernel",
    "seam_attention": "attend_kernel",
}
"""Operation -> the kernel whose options are varied."""

WARPS, STAGES = (1, 2, 4, 8), (1, 2, 3, 4)


def typical(chosen: list[Case]) -> int:
    """Which case is varied: the first in bfloat16, which models bring, else the first."""
    return next((i for i, case in enumerate(chosen) if "bfloat16" in case.name), 0)


@contextmanager
def launched_with(name: str, **options: int) -> Iterator[list[str]]:
    """Inside, launches of the kernel `name` take these options; the list names them as they come."""
    from triton.runtime.jit import JITFunction

    run, seen = JITFunction.run, []

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__name__ == name:
            seen.append(name)
            kwargs |= options
        return run(self, *args, **kwargs)

    JITFunction.run = launch
    try:
        yield seen
    finally:
        JITFunction.run = run


def swept(case: Case, clock: Clock, rounds: int, checked: str) -> list[dict[str, Any]]:
    """A row for each pair of options: times, or why there are none. A wrong result is said and not timed."""
    wanted, rows = result(case, clock.device, clock.small, checked), []
    for warps, stages in product(WARPS, STAGES):
        options = {"num_warps": warps, "num_stages": stages}
        with launched_with(KERNELS[case.operation], **options) as seen:
            try:
                got = result(case, clock.device, clock.small, checked)
                error = max(map(difference, got, wanted))
                if error <= case.tolerance:
                    with backend(checked):
                        row = clock.spread(prepared(case, case.call, clock), rounds)
                else:
                    row = {"wrong": error}
            except Exception as problem:  # too much shared memory, or the compiler refuses: say so and go on
                row = {"not available": f"{type(problem).__name__}: {problem}"[:200]}
        rows.append({**options, "launches": len(seen), **row})
    return rows
