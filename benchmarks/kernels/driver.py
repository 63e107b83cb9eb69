"""Runs every operation in a process of its own, so that a crash, an illegal access or a hang ends with it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import provenance
from benchmarks.kernels import summary

LAST_LINES = 15
RIGHT, UNTIMED, WRONG = "right", "right, not all timed", "wrong"
"""Statuses of an operation whose process came to its end."""


def file_of(args: argparse.Namespace, operation: str | None = None) -> str:
    """Name of the result file of one operation."""
    return f"{'rehearsal' if args.rehearse else 'run'}/{operation or args.operation}"


def command(args: argparse.Namespace, operation: str) -> list[str]:
    """The process that measures one operation."""
    flags = [f"--{name}" for name in ("check", "sweep", "rehearse") if getattr(args, name)]
    module = [sys.executable, "-m", "benchmarks.kernels.run", "--operation", operation]
    return [*module, "--rounds", str(args.rounds), *flags]


def ended(arguments: list[str], timeout: float) -> tuple[str, list[str]]:
    """How a process ended: "" if well or with a red gate, else what happened; and its last lines."""
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=provenance.ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return f"ended after {timeout:g} s", output.splitlines()[-LAST_LINES:]
    lines = output.splitlines()[-LAST_LINES:]
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}", lines
    return ("" if process.returncode in (0, 1) else f"ended with status {process.returncode}"), lines


def outcome(args: argparse.Namespace, operation: str) -> dict[str, Any]:
    """The result of one operation: its own file, with what happened to the process if it did not end by itself."""
    file = provenance.place("kernels") / f"{file_of(args, operation)}.json"
    file.unlink(missing_ok=True)  # an old result must not pass for a new one
    problem, lines = ended(command(args, operation), args.timeout)
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": []}
    if problem or result.get("status") not in (RIGHT, UNTIMED, WRONG):
        unfinished = problem or "ended before its result was written"
        result |= {"status": unfinished, "last_lines": lines}
    return {"operation": operation, **result}


def drive(args: argparse.Namespace, operations: Sequence[str]) -> int:
    """Measure all, write run.json after each, then run.txt, and print the summary. 0 if all were right and timed."""
    about = provenance.head("torch", "triton")
    results: list[dict[str, Any]] = []
    name, begin = "rehearsal" if args.rehearse else "run", time.monotonic()
    for operation in operations:
        if time.monotonic() - begin < args.limit:
            results.append(outcome(args, operation))
        else:
            results.append({"operation": operation, "status": f"not begun: {args.limit:g} s were over", "rows": []})
        print("\n".join(summary.lines(results[-1])), flush=True)
        statuses = {result["operation"]: result["status"] for result in results}
        path = provenance.write("kernels", name, {**about, "statuses": statuses, "operations": results})
    text = [f"{name}, commit {about['commit']}, {about['date']}", *summary.overview(results)]
    text += [line for result in results for line in summary.lines(result)]
    path.with_suffix(".txt").write_text("\n".join(text) + "\n")
    print("\n".join(summary.overview(results)), path, sep="\n")
    return int(any(status != RIGHT for status in statuses.values()))
