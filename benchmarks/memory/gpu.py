"""Elastic memory on a GPU: rules and costs of the driver (part a), memory that moves under load (part d).

    python -m benchmarks.memory.gpu [--part a] [--part d] [--out FOLDER]     # minutes; results as JSON
    python -m benchmarks.memory.gpu --rehearse --out FOLDER                  # no GPU: the same calls over a stand-in
    compute-sanitizer python -m benchmarks.memory.gpu --child LOG --small graphs grow_and_shrink

Every question is caught. One that ends its process, or leaves the GPU unusable, is noted, and the rest is asked in a
new process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.memory.questions import Question, answer, ask

PARTS = {
    "a": (
        "versions", "granularity", "alignments", "calls", "calls_beside_a_kernel", "runs", "memset_over_granules",
        "column", "synchronize", "thread_without_context", "old_bytes", "returned", "graphs",
        "creation_during_a_capture", "partly_mapped", "copies", "torch_keeps", "many_handles",
    ),
    "d": ("grow_and_shrink", "grow_and_shrink_ahead"),
}  # fmt: skip
COLUMNS = {
    "p50, p99, max": "microseconds of one call",
    "waits for the kernel": "calls that never took less than half of the 100 ms that a kernel ran on another stream",
    "column more": "what a request waits for when its pool takes another column, all driver calls of it",
    "map": "the part of it that maps; with 'ahead' a thread created the memory before",
    "NaN read from KV": "states hold NaN only, so one of them is a page that kept the bytes of a state",
    "failed": "why a question has no answer",
}


def questions(machine: Any, small: bool, gigabytes: float) -> dict[str, Question]:
    """Every question by name."""
    from benchmarks.memory import beside, facts, moving

    few = small or machine.rehearsed
    rounds = 1 if machine.rehearsed else 2 if small else 60
    steps = 40 if small else 150 if machine.rehearsed else 1500
    counted: dict[str, Callable[[int], Any]] = {
        name: lambda count, of=of: of(machine, count)
        for name, of in (
            ("calls", facts.calls), ("runs", facts.runs), ("column", facts.column),
            ("synchronize", facts.synchronize), ("graphs", beside.graphs),
        )
    }  # fmt: skip
    plain = (
        facts.granularity, facts.alignments, facts.memset_over_granules, facts.thread_without_context, facts.old_bytes,
        beside.creation_during_a_capture, beside.partly_mapped, beside.torch_keeps,
    )  # fmt: skip
    return {
        "versions": lambda: versions(machine),
        **{of.__name__: lambda of=of: of(machine) for of in plain},
        **{name: lambda of=of: of(rounds) for name, of in counted.items()},
        "calls_beside_a_kernel": lambda: facts.calls_beside_a_kernel(machine, 2 if few else 8),
        "copies": lambda: beside.copies(machine, 2 if few else 20),
        "returned": lambda: facts.returned(machine, 16 if few else 1024),
        "many_handles": lambda: facts.many_handles(machine, 32 if few else 8192),
        "grow_and_shrink": lambda: moving.grow_and_shrink(machine, steps, gigabytes, ahead=False),
        "grow_and_shrink_ahead": lambda: moving.grow_and_shrink(machine, steps, gigabytes, ahead=True),
    }


def versions(machine: Any) -> dict[str, str]:
    """Of the driver, of what drives it, and of the GPU."""
    import torch

    found = {"driver": str(machine.api.cuDriverGetVersion()[1]), "torch": torch.__version__}
    if not machine.rehearsed:
        found["gpu"] = torch.cuda.get_device_name(machine.device)
        found["cuda-bindings"] = importlib.metadata.version("cuda-bindings")
    return found


def child(args: argparse.Namespace) -> None:
    """Ask the questions that are named, in this process."""
    from benchmarks.memory import machine as machines

    machine = machines.rehearsal() if args.rehearse else machines.gpu(args.device)
    every = questions(machine, args.small, args.gigabytes)

    def healthy() -> bool:
        try:
            machine.driver.synchronize()
        except Exception:
            return False
        return True

    answer({name: every[name] for name in args.names}, healthy, Path(args.child))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="questions; all of the parts if none is named")
    parser.add_argument("--part", action="append", choices=PARTS, help="a: the driver, d: under load; both by default")
    parser.add_argument("--out", type=Path, help="folder for gpu.json in place of benchmarks/memory/results")
    parser.add_argument("--device", type=int, default=0, help="which of the visible GPUs")
    parser.add_argument("--gigabytes", type=float, default=16.0, help="the budget of part d")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no question is begun")
    parser.add_argument("--small", action="store_true", help="few rounds, for compute-sanitizer")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: the same calls over a stand-in")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args)
        return
    names = args.names or [name for part in args.part or PARTS for name in PARTS[part]]
    flags = ["--device", str(args.device), "--gigabytes", str(args.gigabytes)]
    flags += ["--small"] * args.small + ["--rehearse"] * args.rehearse
    with tempfile.TemporaryDirectory() as folder:
        log = (args.out or Path(folder)) / "gpu.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.memory.gpu", "--child", str(log), *flags]
        answers = ask(names, command, log, args.limit)
    failed = [name for name, said in answers.items() if "failed" in said]
    result = {"rehearsed": args.rehearse, "columns": COLUMNS, "failed": failed, "result": answers}
    try:
        result = {**provenance.head("torch"), **result}
    except Exception as error:  # the answers are worth more than where they are from
        result["head"] = f"{type(error).__name__}: {error}"
    if args.out:
        path = args.out / "gpu.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    else:
        path = provenance.write("memory", "gpu-rehearsal" if args.rehearse else "gpu", result)
    print(f"{len(names) - len(failed)} of {len(names)} questions answered: {path}")
    if failed:
        sys.exit(f"without an answer: {', '.join(failed)}")


if __name__ == "__main__":
    main()
