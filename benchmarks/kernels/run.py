"""Check every case on a GPU, then time it beside the roofline and other people's kernels.

python -m benchmarks.kernels.run [--operation copy_slots] [--rounds 50] [--check]

No time is taken while a case is wrong: first all selected cases must agree with the naive path on the same inputs and
give the same bits twice. The roofline is measured in the same run: bytes at the rate of a large copy, or flops at the
rate of a large bfloat16 matrix product, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import provenance
from benchmarks.kernels.registry import Case, cases
from sglang_hybrid_kernels import dispatch

SEED = 7
COLUMNS = {
    "error": "largest difference from the naive path over the largest element there, on the same inputs",
    "same_bits": "whether two calls on equal inputs gave equal bits",
    "us": "median microseconds of one call, events on the stream, second-level cache flushed before each",
    "floor_us": "the roofline: moved_bytes at copy_gb_per_s or flops at matmul_tflops, the larger",
    "share_of_floor": "floor_us / us",
    "baselines_us": "other ways to the same result, or the pass it is added to; an error where one does not run",
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


def _result(case: Case, device: torch.device, small: bool, name: str) -> tuple[Tensor, ...]:
    inputs = case.inputs(device, torch.Generator(device).manual_seed(SEED), small)
    with backend(name):
        result = case.call(**inputs)
    return result if isinstance(result, tuple) else (result,)


def gate(case: Case, device: torch.device, small: bool = False, checked: str = "triton") -> dict[str, Any]:
    """The correctness columns of a case; `passed` is false if it is wrong or does not repeat itself."""
    wanted = _result(case, device, small, "naive")
    got = _result(case, device, small, checked)
    again = _result(case, device, small, checked)
    error = max((_difference(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)
    same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(got, again, strict=True))
    return {"error": error, "tolerance": case.tolerance, "same_bits": same, "passed": same and error <= case.tolerance}


def _difference(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted element; infinite where one has NaN and the other has not."""
    got, wanted = got.double(), wanted.double()
    if not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf")
    difference = (got - wanted).nan_to_num(nan=0.0).abs().max().item() if got.numel() else 0.0
    return difference / max(wanted.nan_to_num(nan=0.0).abs().max().item(), 1e-30) if difference else 0.0


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def microseconds(call: Callable[[], Any], rounds: int, flush: Tensor) -> float:
    """Median time of `call` on the current stream."""
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def ceilings(rounds: int, flush: Tensor) -> dict[str, float]:
    """What this GPU copies and multiplies, measured."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy = microseconds(lambda: target.copy_(source), rounds, flush)
    product = microseconds(lambda: a @ b, rounds, flush)
    return {
        "copy_gb_per_s": 2 * source.numel() / copy / 1e3,
        "matmul_tflops": 2 * 8192**3 / product / 1e6,
    }


def timed(case: Case, rounds: int, flush: Tensor, ceiling: dict[str, float]) -> dict[str, Any]:
    """The speed columns of a case."""
    device = torch.device("cuda")

    def one(call: Callable[..., Any]) -> float:
        inputs = case.inputs(device, torch.Generator(device).manual_seed(SEED), False)
        return microseconds(lambda: call(**inputs), rounds, flush)

    us = one(case.call)
    floor = max(case.moved_bytes / ceiling["copy_gb_per_s"] / 1e3, case.flops / ceiling["matmul_tflops"] / 1e6)
    baselines: dict[str, float | str] = {}
    for name, call in case.baselines.items():
        try:
            baselines[name] = one(call)
        except Exception as error:  # someone else's kernel may be absent or refuse these shapes: say so and go on
            baselines[name] = f"{type(error).__name__}: {error}"[:200]
    share = round(floor / us, 3)
    return {"us": us, "floor_us": floor, "share_of_floor": share, "baselines_us": baselines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", help="one operation's cases; default all")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--check", action="store_true", help="correctness only, nothing is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("run.py needs an NVIDIA GPU; without one use compile.py and tests/kernels")
    device = torch.device("cuda")
    chosen = cases(args.operation)
    rows = [{"operation": case.operation, "case": case.name, **gate(case, device)} for case in chosen]
    for row in rows:
        print(json.dumps(row))
    if not all(row["passed"] for row in rows):
        raise SystemExit("wrong results: no speed is measured until they are right")
    if args.check:
        return
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    ceiling = ceilings(args.rounds, flush)
    for case, row in zip(chosen, rows, strict=True):
        row |= {"moved_bytes": case.moved_bytes, "flops": case.flops, **timed(case, args.rounds, flush, ceiling)}
        print(json.dumps(row))
    extra = {"gpu": torch.cuda.get_device_name(0), "seed": SEED, "rounds": args.rounds, "ceilings": ceiling}
    result = {**provenance.head("torch", "triton"), **extra, "columns": COLUMNS, "rows": rows}
    print(provenance.write("kernels", "run", result))


if __name__ == "__main__":
    main()
