"""What the questions about a GPU need of one, and a rehearsal of it on a CPU: the same calls over a stand-in."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.engine.pools.copies import Begin, begin_on

MIB = 1 << 20


@dataclass(frozen=True)
class Machine:
    """One GPU. `spin` keeps the current stream busy for so many milliseconds; `side` makes another stream current;
    `capture` records what a function launches and gives what replays it; `free_bytes` is what the device says."""

    api: Any
    driver: CudaDriver
    device: torch.device
    spin: Callable[[float], None]
    side: Callable[[], AbstractContextManager[Any]]
    synchronize: Callable[[], None]
    capture: Callable[[Callable[[], Any]], Callable[[], Any]]
    begin_copy: Begin
    rehearsed: bool = False


def gpu(index: int) -> Machine:
    """The GPU `index` of those that are visible, with torch's context current."""
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)
    cycles_per_ms = _cycles_per_ms()

    def capture(launch: Callable[[], Any]) -> Callable[[], Any]:
        with torch.cuda.stream(stream):
            launch()  # what is loaded lazily is loaded now
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph.replay

    return Machine(
        importlib.import_module("cuda.bindings.driver"),
        CudaDriver(index, stream=lambda: int(torch.cuda.current_stream(device).cuda_stream)),
        device,
        spin=lambda ms: torch.cuda._sleep(int(ms * cycles_per_ms)),
        side=lambda: torch.cuda.stream(stream),
        synchronize=torch.cuda.synchronize,
        capture=capture,
        begin_copy=begin_on(device),
    )


def _cycles_per_ms() -> float:
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return cycles / (1e3 * (time.perf_counter() - start))


def rehearsal() -> Machine:
    """No GPU: the stand-in that the tests use, over host memory; kernels take no time, graphs are functions."""
    api = importlib.import_module("tests.fake_cuda").BackedCuda()
    device = torch.device("cpu")

    def capture(launch: Callable[[], Any]) -> Callable[[], Any]:
        launch()
        return launch

    return Machine(
        api,
        CudaDriver(0, api=api),
        device,
        spin=lambda ms: None,
        side=nullcontext,
        synchronize=lambda: None,
        capture=capture,
        begin_copy=begin_on(device),
        rehearsed=True,
    )
