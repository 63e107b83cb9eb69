"""Gives back the memory of transitions that vanished, once the passes that made them have run.

Only the device knows which they are. How many stay comes to the host behind the pass, without a wait, and is read when
the scheduler begins a later round. Ranks hold different heads, and an entry keeps as many slots as the rank that needs
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_hybrid.engine.pools.ranks import Group
from sglang_hybrid.segment.index import Entry, SegmentIndex
from sglang_hybrid.segment.leases import Rounds


@dataclass(frozen=True, slots=True)
class _Pass:
    entries: Sequence[Entry]
    stay: Tensor
    arrived: torch.cuda.Event | None


class Settling:
    """Of the entries of `index`; on `ahead` see `Rounds`."""

    def __init__(self, index: SegmentIndex, ahead: int, group: Group | None) -> None:
        self._index, self._group = index, group
        self._rounds = Rounds[_Pass](ahead)

    def launched(self, entries: Sequence[Entry], stay: Tensor) -> None:
        """A pass makes `entries`, of whose transitions so many stay ([entries] int64, where the pass runs)."""
        arrived = None
        if stay.device.type == "cuda":
            host = torch.empty(stay.shape, dtype=stay.dtype, device="cpu", pin_memory=True)
            stay = host.copy_(stay, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._rounds.add(_Pass(entries, stay, arrived))

    def turn(self) -> None:
        """A round of the scheduler begins, on all ranks."""
        for ran in self._rounds.turn():
            self._settle(ran)

    def ran(self) -> None:
        """Every pass that was launched has run, on all ranks."""
        for ran in self._rounds.ran():
            self._settle(ran)

    def _settle(self, ran: _Pass) -> None:
        if ran.arrived is not None:
            ran.arrived.synchronize()
        counts = ran.stay.tolist()
        if self._group is not None:
            counts = self._group.most(counts)
        for entry, kept in zip(ran.entries, counts, strict=True):
            self._index.settle(entry, kept)
