"""The kernel benchmark is rehearsed whole; a crash, a hang or a red gate of one operation stops no other."""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import provenance
from benchmarks.kernels import check, clock, driver, registry, run, sanitize, summary, sweep, timing
from benchmarks.kernels.registry import Case, Prepared
from sglang_hybrid_kernels import dispatch


@pytest.fixture(autouse=True)
def _results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(provenance.RESULTS, str(tmp_path))
    monkeypatch.setenv(provenance.COMMIT, "abc1234")
    dispatch.mode.cache_clear()
    yield
    dispatch.mode.cache_clear()


def options(**changed: Any) -> argparse.Namespace:
    plain = {
        "operation": None,
        "rounds": 2,
        "timeout": 120.0,
        "limit": 3600.0,
        "check": False,
        "sweep": False,
        "rehearse": True,
    }
    return argparse.Namespace(**plain | changed)


@pytest.mark.slow
def test_every_operation_is_rehearsed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert driver.drive(options(), dispatch.operations()) == 0
    written = json.loads((tmp_path / "kernels" / "rehearsal.json").read_text())
    assert written["commit"] == "abc1234"
    assert written["statuses"] == dict.fromkeys(dispatch.operations(), "right")
    for result in written["operations"]:
        assert result["ceilings"]["copy_gb_per_s"] > 0
        for row in result["rows"]:
            assert row["passed"]
            assert row["p10"] <= row["p50"] <= row["p90"]
            assert "share_of_floor" not in row  # no figure of a rehearsal means anything
    baselines = {name: row for result in written["operations"] for name, row in result["rows"][0]["baselines"].items()}
    assert baselines["PyTorch, slot by slot"]["differs"] == 0
    assert "not available" in baselines["SGLang, fused_copy_conv_slots and gather"]
    text = (tmp_path / "kernels" / "rehearsal.txt").read_text()
    assert text.count("roofline, measured: copy") == len(dispatch.operations())
    assert "no figure means anything" in text
    assert "not available: " in text
    assert capfd.readouterr().out.rstrip().endswith("rehearsal.json")


FAULTS = {
    "compose": ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
    "conv_window_at": ("import time; print('sat down', flush=True); time.sleep(600)", "ended after 3 s"),
    "state_at": ("raise RuntimeError('an illegal memory access')", "ended before its result was written"),
    "seam_attention": ("import sys; sys.exit(7)", "ended with status 7"),
}


def test_what_ends_one_operation_ends_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    command = driver.command

    def faulty(args: argparse.Namespace, operation: str) -> list[str]:
        return [sys.executable, "-c", FAULTS[operation][0]] if operation in FAULTS else command(args, operation)

    monkeypatch.setattr(driver, "command", faulty)
    old = provenance.write("kernels", "rehearsal/compose", {"status": "right", "rows": []})
    assert driver.drive(options(timeout=3.0, check=True), [*FAULTS]) == 1
    assert driver.drive(options(check=True), ["compose", "copy_slots"]) == 1
    assert not old.exists()
    last = json.loads((tmp_path / "kernels" / "rehearsal.json").read_text())
    assert last["statuses"] == {"compose": "ended by SIGSEGV", "copy_slots": "right"}


@pytest.mark.parametrize("operation", FAULTS)
def test_what_happened_is_said(monkeypatch: pytest.MonkeyPatch, operation: str):
    code, said = FAULTS[operation]
    monkeypatch.setattr(driver, "command", lambda *_: [sys.executable, "-c", code])
    result = driver.outcome(options(timeout=3.0), operation)
    assert result["status"] == said
    text = "\n".join(summary.lines(result))
    assert said in text
    assert {"conv_window_at": "sat down", "state_at": "an illegal memory access"}.get(operation, said) in text


def case(call: Any, **more: Any) -> Case:
    return Case("copy_slots", "a case", lambda *_: {}, call, 1e-3, 1, **more)


def measure(cases: list[Case], **changed: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result, and what was published on the way."""
    published: list[dict[str, Any]] = []
    keep = lambda result: published.append(json.loads(json.dumps(result)))  # noqa: E731
    return run.measured(cases, clock.Rehearsal(), options(**changed), keep), published


def by_call(*values: float) -> Any:
    """A call that gives one value after the other, the last for ever."""
    left = list(values)
    return lambda: torch.tensor([left.pop(0) if len(left) > 1 else left[0]])


def raises(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room")


def test_a_red_gate_stops_the_timing_of_its_operation_after_all_its_checks():
    result, published = measure([case(raises), case(by_call(1.0, 2.0)), case(by_call(1.0))])
    assert result["status"] == driver.WRONG
    assert [row["passed"] for row in result["rows"]] == [False, False, True]
    assert result["rows"][0]["raised"] == "MemoryError: no room"
    assert not any("p50" in row for row in result["rows"])
    assert all(step["status"] == "running" for step in published)


def test_a_case_that_cannot_be_timed_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    cases, timed = [case(by_call(1.0)), case(by_call(2.0))], timing.timed
    monkeypatch.setattr(timing, "timed", lambda it, *rest: raises() if it is cases[0] else timed(it, *rest))
    result, published = measure(cases)
    assert result["status"] == driver.UNTIMED
    assert result["rows"][0]["not timed"] == "MemoryError: no room"
    assert result["rows"][1]["p50"] > 0
    assert published[-1]["status"] == "running"  # a crash from here on is not taken for an end


@pytest.mark.parametrize("piece", [1, 1 << 26])
def test_a_head_that_is_wrong_is_not_hidden_by_larger_ones(monkeypatch: pytest.MonkeyPatch, piece: int):
    monkeypatch.setattr(check, "PIECE", piece)
    wanted = torch.ones(2, 3, 4, 5)
    wanted[1, 2] = 1e-4
    got = wanted.clone()
    got[1, 2] *= 1.5
    assert check.difference(got, wanted) < 1e-3
    assert check.by_head(got, wanted, -3) == pytest.approx(0.5)
    assert check.by_head(got, wanted, None) == 0.0
    assert check.by_head(got[1, 2, 0], wanted[1, 2, 0], -1) == pytest.approx(0.5)
    assert check.by_head(wanted, wanted, -3) == 0.0
    which = {"naive": wanted, "triton": got}
    hidden = case(lambda: which[dispatch.mode()])
    assert check.gate(hidden, torch.device("cpu"))["passed"]
    assert not check.gate(case(hidden.call, heads=(-3,)), torch.device("cpu"))["passed"]


def test_a_baseline_that_fails_is_said_and_one_that_differs_too():
    calls = {"absent": raises, "prepared": Prepared(lambda: lambda: torch.tensor([3.0])), "other form": lambda: None}
    (row,) = measure([case(by_call(2.0), baselines=calls)])[0]["rows"]
    assert row["baselines"]["absent"] == {"not available": "MemoryError: no room"}
    assert row["baselines"]["prepared"]["differs"] == pytest.approx(0.5)
    assert "differs" not in row["baselines"]["other form"]


class Device:
    """Stands in for torch.cuda: a queue of what the host submits, and a GPU that is asleep until it is waited for."""

    def __init__(self, awake: bool) -> None:
        self.awake, self.done = awake, list[str]()

    def event(self, **_: Any) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                device.done.append("event")

            def query(self) -> bool:
                return device.awake

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return 0.002

        return Event()


@pytest.mark.parametrize("awake", [False, True])
def test_the_launch_is_hidden_or_the_figure_says_that_it_is_not(monkeypatch: pytest.MonkeyPatch, awake: bool):
    device = Device(awake)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: device.done.append("sleep"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    gpu = object.__new__(clock.Gpu)
    gpu._flush, gpu._cycles_per_us = torch.ones(4), 1000.0
    times = gpu.spread(lambda: device.done.append("call"), 3)
    assert times == {"p10": 2.0, "p50": 2.0, "p90": 2.0, "hidden": float(not awake)}
    assert device.done[-4 * 3 :] == ["sleep", "event", "call", "event"] * 3
    assert ("launch hidden 0%" in summary._spread(times)) is awake


def test_the_commit_is_asked_for_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert provenance.head("torch")["commit"] == "abc1234"
    assert provenance.place("kernels") == tmp_path / "kernels"
    monkeypatch.delenv(provenance.COMMIT)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(run, "measured", raises)
    with pytest.raises(RuntimeError, match=f"set {provenance.COMMIT} to the commit"):
        run.one(options(operation="copy_slots"))
    monkeypatch.setattr(provenance.subprocess, "run", missing)
    with pytest.raises(RuntimeError, match=f"set {provenance.COMMIT} to the commit"):
        provenance.commit()
    monkeypatch.delenv(provenance.RESULTS)
    assert provenance.place("kernels") == tmp_path / "benchmarks" / "kernels" / "results"


def missing(*_: Any, **__: Any) -> Any:
    raise FileNotFoundError("git")


def test_a_sweep_launches_its_kernel_with_every_pair_of_options(monkeypatch: pytest.MonkeyPatch):
    from triton.runtime.jit import JITFunction

    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: seen.append((self.__name__, kwargs)))
    from sglang_hybrid_kernels.compose.triton import compose_kernel, fold_kernel

    def launch() -> torch.Tensor:
        compose_kernel.run(grid=(1,), num_warps=8)
        fold_kernel.run(grid=(1,), num_warps=8)
        return torch.tensor([1.0])

    launched = Case("compose", "a case", lambda *_: {}, launch, 1e-3, 1)
    rows = sweep.swept(launched, clock.Rehearsal(), 1, "naive")
    assert len(rows) == len(sweep.WARPS) * len(sweep.STAGES)
    assert all(row["launches"] == 2 and row["p50"] > 0 for row in rows)  # for the result, and for one round
    tried = {(name, kwargs["num_warps"], kwargs.get("num_stages")) for name, kwargs in seen}
    assert {("compose_kernel", row["num_warps"], row["num_stages"]) for row in rows} <= tried
    assert {entry for entry in tried if entry[0] == "fold_kernel"} == {("fold_kernel", 8, None)}


def test_a_sweep_is_of_what_models_bring():
    """For each operation: the case that is varied."""
    cases = {operation: registry.cases(operation) for operation in sweep.KERNELS}
    names = {operation: some[sweep.typical(some)].name for operation, some in cases.items()}
    assert {operation for operation, name in names.items() if "bfloat16" in name} == {*names} - {"seam_attention"}
    (row,) = measure([case(by_call(1.0))], sweep=True)[0]["rows"]
    assert "sweep" not in row  # copy_slots has no kernel that is varied
    row = measure([Case("compose", "", lambda *_: {}, by_call(1.0), 1e-3, 1)], sweep=True)[0]["rows"][0]
    assert len(row["sweep"]) == len(sweep.WARPS) * len(sweep.STAGES)


def test_a_sweep_times_no_wrong_result_and_names_what_does_not_compile():
    wrong = sweep.swept(Case("compose", "", lambda *_: {}, by_call(1.0, 2.0), 1e-3, 1), clock.Rehearsal(), 1, "naive")
    assert all("p50" not in row and row["wrong"] == pytest.approx(1.0) for row in wrong)
    calls = iter([torch.tensor([1.0])])
    gone = sweep.swept(Case("compose", "", lambda *_: {}, lambda: next(calls), 1e-3, 1), clock.Rehearsal(), 1, "naive")
    assert all(row["not available"].startswith("StopIteration") for row in gone)


def test_a_sanitizer_that_is_absent_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert sanitize.under("racecheck", 1.0, [])["status"].startswith("not available: compute-sanitizer")


@pytest.mark.parametrize(("status", "said"), [(0, "clean"), (sanitize.FAULT, "found: ended with status 86")])
def test_the_copies_run_under_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str):
    """A program of the sanitizer's name that runs what it is given and ends as told."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nshift 4\n"$@" || exit 1\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize, "TOOLS", ("racecheck",))
    monkeypatch.setattr("sys.argv", ["sanitize.py", "--rehearse", "--rounds", "2"])
    with pytest.raises(SystemExit) as end:
        sanitize.main()
    assert end.value.code == int(status != 0)
    written = json.loads((tmp_path / "kernels" / "sanitize.json").read_text())
    assert written["tools"]["racecheck"]["status"] == said
    assert "wrong rounds: 0 of 3" in written["tools"]["racecheck"]["last_lines"]
    assert written["wrong_rounds"] == 0


def test_copies_out_of_order_are_wrong_rounds(monkeypatch: pytest.MonkeyPatch):
    """The chains can tell: all reads before all writes give other bits."""

    def at_once(pools: Any, source: Any, destination: Any, **_: Any) -> None:
        for pool in pools:
            pool[:, destination] = pool[:, source]

    original = sanitize.copy_slots
    monkeypatch.setattr(sanitize, "copy_slots", lambda *a, **k: (at_once if "check_slots" in k else original)(*a, **k))
    assert sanitize.copies(3, torch.device("cpu"), "naive") == 3
