"""Memory that grows, moves between KV and states and goes back, under work of the device: stalls, and what is read."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from benchmarks.memory.facts import MODEL
from benchmarks.memory.machine import MIB, Machine
from benchmarks.memory.questions import quantiles
from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import PRESETS
from sglang_hybrid.device.tensors import Rows, page_major_tensors, plane_tensors
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.memory.meter import Meter
from sglang_hybrid.memory.sizing import CUDA, KV, STATE, Kinds, Sizing, choose

STEP_MS = 5.0  # of the device per round, about a step of decoding
IDLE_S = 0.05
NOT_A_NUMBER = 0xFF  # every byte of a state: NaN as bfloat16, float16 and float32


def sizing(machine: Machine, gigabytes: float) -> Sizing:
    """KV and states of Qwen3-Next on one GPU, or of a toy model in a rehearsal."""
    if machine.rehearsed:
        return choose(Kinds(2048, 2, 1, 300_000), 64 * MIB, CUDA, 2)
    spec = PRESETS[MODEL]
    kinds = Kinds(spec.kv_row_bytes, spec.kv_planes, 1, spec.checkpoint_bytes)
    return choose(kinds, int(gigabytes * 1e9), CUDA, 5)


class Mover:
    """An arena whose pages are written and read as a server would, the ids of what it holds, and what was wrong.

    Pages of KV hold the number of the draw they came from; states hold NaN. So a NaN in KV was read from a former
    state, and another number from a page that two owners have.
    """

    def __init__(self, machine: Machine, gigabytes: float, seed: int) -> None:
        self.machine = machine
        self.rng = random.Random(seed)
        size = sizing(machine, gigabytes)
        self.arena = Arena(size, machine.driver, machine.device, IDLE_S, time.monotonic, time.thread_time,
                           begin_copy=machine.begin_copy)  # fmt: skip
        states, kv = size.state_layout, size.kv_layout
        _, at = self.arena.open(states)
        rows = Rows(1, (size.state_slot_bytes,), torch.uint8)
        (self.states,) = page_major_tensors(self.arena.pooled, states, at, [rows], machine.device)
        _, at = self.arena.open(kv)
        width = size.kinds.kv_row_bytes // 2
        self.kv = plane_tensors(self.arena.pooled, kv, kv.planes[0], at, (width,), torch.bfloat16, machine.device)
        self.held: dict[str, list[tuple[torch.Tensor, int]]] = {KV: [], STATE: []}
        self.nans = torch.zeros((), dtype=torch.int64, device=machine.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
        self.refused = 0

    def step(self, draw: int) -> None:
        """One round: the device works, something is drawn and something given back."""
        self.arena.used()
        self.machine.spin(STEP_MS)
        name = self.rng.choice((KV, STATE))
        layout = self.arena.supplies[name].pool.layout
        count = self.rng.randint(1, max(1, layout.pages // 6))
        while self.rng.random() < 0.4 or self.arena.supplies[name].available < count:
            if not self._give(self.rng.choice((KV, STATE))) and not (self.held[KV] or self.held[STATE]):
                break
        pages = self.arena.supplies[name].take(count)
        if pages is None:
            self.refused += 1
            return
        number = draw % 200 + 1
        if name == KV:
            plane = self.rng.choice(self.kv)
            self.nans += plane[pages].isnan().sum()
            for each in self.kv:
                each[pages] = float(number)
        else:
            self.states[0, pages] = NOT_A_NUMBER
        self.held[name].append((pages, number))

    def _give(self, name: str) -> bool:
        """Give back what one draw of a kind got, after a look at it."""
        if not self.held[name]:
            return False
        pages, number = self.held[name].pop(self.rng.randrange(len(self.held[name])))
        if name == KV:
            self.wrong += (self.rng.choice(self.kv)[pages] != float(number)).sum()
        else:
            self.wrong += (self.states[0, pages] != NOT_A_NUMBER).sum()
        self.arena.supplies[name].give(pages)
        return True

    def close(self) -> None:
        """Give everything back to the device."""
        self.arena.supplies[KV].clear()
        self.arena.supplies[STATE].clear()
        self.arena.pooled.close()


def grow_and_shrink(machine: Machine, rounds: int, gigabytes: float, ahead: bool) -> dict[str, Any]:
    """So many rounds; stalls in microseconds, with memory created ahead by a thread or not."""
    mover = Mover(machine, gigabytes, seed=7)
    arena = mover.arena
    if ahead:
        arena.start_prefault()
    try:
        for draw in range(rounds):
            mover.step(draw)
            if draw % 20 == 19:
                time.sleep(IDLE_S)
                arena.settle()
        arena.check()
        nans, wrong = int(mover.nans), int(mover.wrong)
        found = {
            "column more": _meter(arena.grown),
            "map": _meter(arena.backing.mapped),
            "unmap": _meter(arena.backing.unmapped),
            "granules that changed kind": arena.budget.transfers,
            "draws refused": mover.refused,
            "NaN read from KV": nans,
            "numbers of somebody else": wrong,
            "most granules mapped": arena.most_mapped,
            "granules": arena.budget.total,
            "granule, MiB": arena.sizing.granule_bytes / MIB,
            "torch gave back": arena.pooled.reclaimed,
        }
        for name in (KV, STATE):
            while mover._give(name):
                pass
        arena.release()
        pinned = arena.sizing.kv_column_granules + arena.sizing.state_column_granules
        found["granules left that nobody needs"] = arena.pooled.committed_bytes // arena.sizing.granule_bytes - pinned
    finally:
        if arena.prefaulter is not None:
            arena.prefaulter.stop()
        mover.close()
    if nans or wrong:
        raise InvariantError(f"memory that moved was misread: {found}")
    return found


def _meter(meter: Meter) -> dict[str, Any]:
    """Calls of one kind: how many, what they moved, failures, and the quantiles of the latest."""
    waited, computed = list(meter.seconds), list(meter.processor_s)
    return {
        "calls": meter.calls,
        "granules": meter.granules,
        "failed": meter.failed,
        **({"us": quantiles(waited), "processor_us": quantiles(computed)} if waited else {}),
    }
