"""How long a call takes: on a GPU without the time Python needs to launch it, on a CPU for rehearsals only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from sglang_hybrid.engine.cpu import vision

WARM_UP = 5
HIDE_US, LONGEST_HIDE_US = 100.0, 50_000.0
"""Least time by which a launch is hidden, and the most."""

COLUMNS = {
    "p10, p50, p90": "microseconds of one call, its launch hidden and the second-level cache flushed before each",
    "hidden": "share of rounds whose launch was over before the GPU reached it; below 1 Python's time is in the figure",
}


class Clock(Protocol):
    """Measures calls on `device`; `small` says which size of inputs suits it."""

    device: torch.device
    small: bool
    name: str

    def spread(self, call: Callable[[], Any], rounds: int) -> dict[str, float]:
        """COLUMNS of a call."""

    def ceilings(self, rounds: int) -> dict[str, float]:
        """What this machine copies and multiplies, measured: copy_gb_per_s, matmul_tflops."""


class Gpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device, self.small = torch.device("cuda"), False
        self.name = torch.cuda.get_device_name(0)
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self._cycles_per_us = self._rate()

    def spread(self, call: Callable[[], Any], rounds: int) -> dict[str, float]:
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        launch_us = (time.perf_counter() - begin) * 1e6
        wait = int(min(max(2 * launch_us, HIDE_US), LONGEST_HIDE_US) * self._cycles_per_us)
        times, hidden = [], 0
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            torch.cuda._sleep(wait)  # the GPU waits here until the call is queued
            start.record()
            call()
            end.record()
            hidden += not start.query()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return {**quantiles(times), "hidden": hidden / rounds}

    def ceilings(self, rounds: int) -> dict[str, float]:
        return _ceilings(self, rounds, 1 << 30, 8192, torch.bfloat16)

    def _rate(self) -> float:
        cycles = 10_000_000
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (start.elapsed_time(end) * 1e3)


class Rehearsal:
    """A CPU: every step is taken, and no figure means anything."""

    def __init__(self) -> None:
        self.device, self.small = torch.device("cpu"), True
        self.name = "rehearsal on a CPU: no figure means anything"
        vision.install()  # else SGLang does not import where torchvision has no CUDA

    def spread(self, call: Callable[[], Any], rounds: int) -> dict[str, float]:
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return {**quantiles(times), "hidden": 0.0}

    def ceilings(self, rounds: int) -> dict[str, float]:
        return _ceilings(self, rounds, 1 << 20, 64, torch.float32)


def quantiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"p{at}": ordered[round((len(ordered) - 1) * at / 100)] for at in (10, 50, 90)}


def _ceilings(clock: Clock, rounds: int, size: int, side: int, dtype: torch.dtype) -> dict[str, float]:
    source = torch.randint(256, (size,), dtype=torch.uint8, device=clock.device)  # zeros may be faster than data
    target = torch.empty_like(source)
    a, b = torch.randn(2, side, side, device=clock.device).to(dtype)
    copy = clock.spread(lambda: target.copy_(source), rounds)["p50"]
    product = clock.spread(lambda: a @ b, rounds)["p50"]
    return {"copy_gb_per_s": 2 * size / copy / 1e3, "matmul_tflops": 2 * side**3 / product / 1e6}
