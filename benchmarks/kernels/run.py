"""Check every operation on a GPU, then time it beside the roofline and other people's kernels.

python -m benchmarks.kernels.run [--timeout 240] [--rounds 50] [--check] [--sweep]   # all, each in a process of its own
python -m benchmarks.kernels.run --operation copy_slots                              # one, in this process
python -m benchmarks.kernels.run --rehearse                                          # every step on a CPU, no figures

An operation is timed only if all its cases agree with the naive path on the same inputs and give the same bits twice.
One that is wrong, crashes or hangs does not stop the others; the command then ends with status 1. The roofline is
measured by every process: bytes at the rate of a large copy, or flops at the rate of a large bfloat16 matrix product,
whichever takes longer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.kernels import check, clock, driver, summary, sweep, timing
from benchmarks.kernels.registry import Case, cases
from sglang_hybrid_kernels import dispatch


def measured(
    chosen: list[Case], watch: clock.Clock, args: argparse.Namespace, publish: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Rows of one operation; what is known so far is published after every step, for the next one may crash."""
    checked = "naive" if args.rehearse else "triton"
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"status": "running", "rows": rows}
    for case in chosen:
        rows.append({"operation": case.operation, "case": case.name})
        publish(result)
        try:
            rows[-1] |= check.gate(case, watch.device, watch.small, checked)
        except Exception as error:  # one case that does not run is a wrong one, and the others are still checked
            rows[-1] |= {"passed": False, "raised": f"{type(error).__name__}: {error}"[:2000]}
        publish(result)
    if not all(row["passed"] for row in rows):
        return {**result, "status": driver.WRONG}
    if args.check:
        return {**result, "status": driver.RIGHT}
    result["ceilings"] = watch.ceilings(args.rounds)
    for case, row in zip(chosen, rows, strict=True):
        try:
            row |= timing.timed(case, watch, args.rounds, result["ceilings"], checked)
        except Exception as error:  # right and not timed: the other cases still are
            row["not timed"] = f"{type(error).__name__}: {error}"[:2000]
        publish(result)
    if args.sweep and chosen[0].operation in sweep.KERNELS:
        at = sweep.typical(chosen)
        rows[at]["sweep"] = sweep.swept(chosen[at], watch, args.rounds, checked)
    return {**result, "status": driver.UNTIMED if any("not timed" in row for row in rows) else driver.RIGHT}


def one(args: argparse.Namespace) -> str:
    """Measure args.operation in this process; returns its status."""
    about = provenance.head("torch", "triton")
    if not args.rehearse and not torch.cuda.is_available():
        raise SystemExit("run on an NVIDIA GPU, or with --rehearse; without a GPU: compile.py and tests/kernels")
    watch = clock.Rehearsal() if args.rehearse else clock.Gpu()
    about |= {"device": watch.name, "seed": check.SEED, "rounds": args.rounds, "operation": args.operation}
    about["columns"] = {**check.COLUMNS, **clock.COLUMNS, **timing.COLUMNS}

    def publish(result: dict[str, Any]) -> None:
        provenance.write("kernels", driver.file_of(args), {**about, **result})

    chosen = cases(args.operation)
    result = measured(chosen[:1] if args.rehearse else chosen, watch, args, publish)
    publish(result)
    print("\n".join(summary.lines(result)), flush=True)
    return str(result["status"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", choices=dispatch.operations(), help="one operation, in this process")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that one operation may take")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no operation is begun")
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--sweep", action="store_true", help=f"also try warps and stages of {', '.join(sweep.KERNELS)}")
    parser.add_argument("--rehearse", action="store_true", help="first case of each, small, naive path, on a CPU")
    args = parser.parse_args()
    if args.rehearse and not os.environ.get(provenance.RESULTS):
        os.environ[provenance.RESULTS] = tempfile.mkdtemp(prefix="rehearsal-")
    if args.operation:
        raise SystemExit(int(one(args) != driver.RIGHT))
    raise SystemExit(driver.drive(args, dispatch.operations()))


if __name__ == "__main__":
    main()
