"""Work of the device beside memory that moves: graphs, captures, copies of ids, tensors over addresses without memory.

Every function is one question (see questions.py). Times are in microseconds.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch

from benchmarks.memory.facts import KERNEL_MS
from benchmarks.memory.machine import MIB, Machine
from benchmarks.memory.questions import quantiles
from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.tensors import bytes_at
from sglang_hybrid.engine.pools.copies import send
from sglang_hybrid.memory.backing import Run

SIZE = 2 * MIB


def graphs(machine: Machine, rounds: int) -> dict[str, Any]:
    """A captured graph adds one to a granule while its neighbours come and go; every replay must be seen."""
    stalls = []
    with PooledBacking(machine.driver, [9], SIZE, 9) as backing:
        backing.map([Run(0, 4, 1)])
        numbers = bytes_at(backing.address(0, 4), SIZE, machine.device, backing).view(torch.float32)
        replay = machine.capture(lambda: numbers.add_(1.0))
        machine.synchronize()
        before = float(numbers[0])
        for index in range(rounds):
            neighbour = [Run(0, (3, 5, 0, 8)[index % 4], 1)]
            replay()
            start = time.perf_counter()
            backing.map(neighbour)
            stalls.append(time.perf_counter() - start)
            replay()
            backing.unmap(neighbour)
        machine.synchronize()
        wrong = int((numbers != before + 2 * rounds).sum())
    if wrong:
        raise InvariantError(f"a graph missed its memory while neighbours moved: {wrong} of {numbers.numel()} numbers")
    return {"replays": 2 * rounds, "numbers that are wrong": wrong, "map beside a replay": quantiles(stalls)}


def creation_during_a_capture(machine: Machine) -> dict[str, str]:
    """Whether the thread that creates ahead may work while another captures a graph."""
    said = {}
    numbers = torch.zeros(1024, device=machine.device)

    def create() -> None:
        machine.driver.bind()
        try:
            machine.driver.release(machine.driver.create(SIZE), SIZE)
            said["creation"] = "works"
        except Exception as error:
            said["creation"] = f"{type(error).__name__}: {error}"[:200]

    def launch() -> None:
        numbers.add_(1.0)
        thread = threading.Thread(target=create)
        thread.start()
        thread.join()

    try:
        machine.capture(launch)()
        machine.synchronize()
        said["capture"] = "works"
    except Exception as error:
        said["capture"] = f"{type(error).__name__}: {error}"[:200]
    return said


def partly_mapped(machine: Machine) -> dict[str, Any]:
    """Tensors of which only the first granule has memory: torch's kernels, a gather, a stride past the end."""
    with PooledBacking(machine.driver, [64], SIZE, 64) as backing:
        backing.map([Run(0, 0, 1)])
        numbers = bytes_at(backing.address(0), 64 * SIZE, machine.device, backing).view(torch.float32)
        count = SIZE // 4
        numbers[:count].add_(1.0)
        index = torch.arange(0, count, 97, device=machine.device)
        strided = numbers.as_strided((4, count), (count, 1))
        found: dict[str, Any] = {
            "kernel": float(numbers[:count].sum()) == count,
            "gather": float(strided[0].index_select(0, index).sum()) == len(index),
            "device of the tensor": str(numbers.device),
        }
        if not machine.rehearsed:
            found["triton"] = _triton(numbers, count)
    if not all(value for value in found.values()):
        raise InvariantError(f"a kernel misread a tensor of which a part has memory: {found}")
    return found


def _triton(numbers: torch.Tensor, count: int) -> bool:
    """Whether a Triton kernel whose pointer is the start of the range adds one to what has memory."""
    from benchmarks.memory.add_one import add_one

    add_one[(-(-count // 1024),)](numbers, count, BLOCK=1024)
    return bool((numbers[:count] == 2.0).all())


def copies(machine: Machine, rounds: int) -> dict[str, Any]:
    """Ids on their way to the host and back behind a kernel of 100 ms: what the scheduler pays; that they arrive."""
    times: list[float] = []
    sent: list[float] = []
    early = 0
    for index in range(rounds):
        ids = torch.arange(index, index + 512, device=machine.device)
        machine.synchronize()
        machine.spin(KERNEL_MS)
        start = time.perf_counter()
        copy = machine.begin_copy(ids)
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        there = send(np.arange(index, index + 512), machine.device)
        sent.append(time.perf_counter() - start)
        early += copy.done()
        if not bool((there == ids).all()):
            raise InvariantError(f"ids changed on their way to the device: round {index}")
        if copy.ids().tolist() != list(range(index, index + 512)):
            raise InvariantError(f"ids changed on their way to the host: round {index}")
    return {"begin": quantiles(times), "send": quantiles(sent), "done while the kernel runs": early, "of": rounds}


def torch_keeps(machine: Machine) -> dict[str, Any]:
    """Free memory in MiB before torch took a GiB, while it keeps it unused, and once its cache was emptied."""
    free = [machine.driver.available_bytes()]
    if not machine.rehearsed:
        block = torch.empty(1 << 30, dtype=torch.uint8, device=machine.device)
        del block
        free.append(machine.driver.available_bytes())
        start = time.perf_counter()
        torch.cuda.empty_cache()
        emptied = time.perf_counter() - start
        free.append(machine.driver.available_bytes())
        return {"free, MiB": [each // MIB for each in free], "empty_cache": quantiles([emptied])}
    return {"free, MiB": [each // MIB for each in free]}
