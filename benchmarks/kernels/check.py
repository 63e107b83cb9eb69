"""Whether a case is right: the kernels against the naive path on the same inputs, and against themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.registry import Case
from sglang_hybrid_kernels import dispatch

SEED = 7
HEAD_TOLERANCE = 4
"""How many times the tolerance a head's error may be: its own norm is smaller than the largest element of all."""

PIECE = 1 << 26
"""Elements that are compared at once, in float64."""

COLUMNS = {
    "error": "largest difference from the naive path over the largest element there, on the same inputs",
    "head_error": "norm of the difference over the norm of what is wanted, for the worst head of a state or a token",
    "same_bits": "whether two calls on equal inputs gave equal bits",
}


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Inside, every operation takes this backend."""
    before = os.environ.get(dispatch.VARIABLE)
    os.environ[dispatch.VARIABLE] = name
    dispatch.mode.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(dispatch.VARIABLE)
        if before is not None:
            os.environ[dispatch.VARIABLE] = before
        dispatch.mode.cache_clear()


def result(case: Case, device: torch.device, small: bool, name: str) -> tuple[Tensor, ...]:
    """What the case gives on this backend, from inputs that are the same every time."""
    inputs = case.inputs(device, torch.Generator(device).manual_seed(SEED), small)
    with backend(name):
        made = case.call(**inputs)
    return made if isinstance(made, tuple) else (made,)


def gate(case: Case, device: torch.device, small: bool = False, checked: str = "triton") -> dict[str, Any]:
    """The correctness columns of a case; `passed` is false if it is wrong or does not repeat itself."""
    wanted = result(case, device, small, "naive")
    got = result(case, device, small, checked)
    again = result(case, device, small, checked)
    heads = case.heads * len(got) if len(case.heads) == 1 else case.heads or (None,) * len(got)
    error = max((difference(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)
    head_error = max((by_head(a, b, at) for a, b, at in zip(got, wanted, heads, strict=True)), default=0.0)
    same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(got, again, strict=True))
    right = error <= case.tolerance and head_error <= HEAD_TOLERANCE * case.tolerance
    row = {"error": error, "head_error": head_error, "tolerance": case.tolerance}
    return {**row, "same_bits": same, "passed": same and right}


def difference(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted element; infinite where one has NaN and the other has not."""
    worst = largest = 0.0
    for a, b in _pieces(got, wanted):
        if not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        if a.numel():
            worst = max(worst, (a - b).nan_to_num(nan=0.0).abs().max().item())
            largest = max(largest, b.nan_to_num(nan=0.0).abs().max().item())
    return worst / max(largest, 1e-30) if worst else 0.0


def by_head(got: Tensor, wanted: Tensor, axis: int | None) -> float:
    """Norm of the difference over the norm of what is wanted, the largest of all heads; 0 without an axis of heads.

    Every index up to the axis is a head of its own, so that no other layer, slot or token hides its error.
    """
    if axis is None:
        return 0.0
    worst = 0.0
    for a, b in _pieces(got, wanted):
        if a.numel():
            within = tuple(range(axis + 1, 0)) or (-1,)
            if axis == -1:
                a, b = a.unsqueeze(-1), b.unsqueeze(-1)
            off, norm = ((x.nan_to_num(nan=0.0)).square().sum(within).sqrt() for x in (a - b, b))
            worst = max(worst, (off / norm.clamp_min(1e-30)).max().item())
    return worst


def _pieces(got: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in float64, some of the first dimension after the other: a pool of states fills a GPU."""
    if got.dim() < 3 or not got.numel():
        yield got.double(), wanted.double()
        return
    at_once = max(1, PIECE // got[0].numel())
    for a, b in zip(got.split(at_once), wanted.split(at_once), strict=True):
        yield a.double(), b.double()


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)
