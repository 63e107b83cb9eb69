"""Runs questions one by one, each caught, in a process that is replaced when one of them ends it or its GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Question = Callable[[], Any]


def answer(questions: Mapping[str, Question], healthy: Callable[[], bool], log: Path) -> None:
    """Ask all of `questions` and append each answer to `log`; end the process where the device is beyond use."""
    for name, question in questions.items():
        _append(log, {"name": name, "begun": True})
        start = time.perf_counter()
        try:
            said: dict[str, Any] = {"result": question()}
        except Exception as error:
            traceback.print_exc()
            said = {"failed": f"{type(error).__name__}: {error}"[:600]}
        said["seconds"] = round(time.perf_counter() - start, 3)
        _append(log, {"name": name, **said})
        print(f"{said['seconds']:8.2f} s  {name}: {said.get('failed') or said['result']}", flush=True)
        if "failed" in said and not healthy():
            sys.exit(3)


def ask(names: Sequence[str], command: Sequence[str], log: Path, limit_s: float) -> dict[str, Any]:
    """Every one of `names` by what it said, or by why it did not, asked in processes that `command` starts.

    `command` gets the names that are left; it calls `answer`. After `limit_s` seconds nothing more is begun.
    """
    log.unlink(missing_ok=True)
    end = time.monotonic() + limit_s
    left = list(names)
    while left and time.monotonic() < end:
        try:
            code: int | str = subprocess.run(
                [*command, *left], check=False, timeout=max(1.0, end - time.monotonic())
            ).returncode
        except subprocess.TimeoutExpired:
            code = "the time limit"
        answers, begun = _read(log)
        if left[0] not in answers and left[0] not in begun:
            break  # it did not come as far as the first one: another try would not either
        for name in begun - set(answers):
            _append(log, {"name": name, "failed": f"ended the process: {code}"})
        answers, _ = _read(log)
        left = [name for name in names if name not in answers]
    answers, _ = _read(log)
    return {name: answers.get(name, {"failed": "not asked"}) for name in names}


def _append(log: Path, line: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _read(log: Path) -> tuple[dict[str, Any], set[str]]:
    """Answers by name, and the names of all questions that were begun."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    begun = {line["name"] for line in lines}
    answers = {line.pop("name"): line for line in lines if "begun" not in line}
    return answers, begun


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest of `seconds`, in microseconds."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(1e6 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) for name, share in at.items()
    }
