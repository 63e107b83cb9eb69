"""Processes that train one network together: each takes its share of a step's rows, all apply the sum of gradients.

One thread each: the matrices of a reader are too small for two threads to share, and a process that waits for a
processor holds up the others once per step, not once per operation.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.core.errors import ConfigError

_PATIENCE = datetime.timedelta(days=30)  # a training may be stopped and continued by signals


@dataclass(frozen=True, slots=True)
class Team:
    """Number `rank` of `size` processes."""

    rank: int = 0
    size: int = 1

    def shares(self, count: int) -> range:
        """Which of a step's `count` parts this process takes."""
        return range(self.rank, count, self.size)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Leave the sum over all processes in each of `tensors`, which are of the same shapes in all of them."""
        if self.size == 1:
            return
        import torch.distributed as dist

        flat = torch.cat([tensor.flatten() for tensor in tensors])
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:  # what gloo raises where the other end is gone
            raise ConfigError("another process of this training is gone; go on with --resume") from error
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


@contextlib.contextmanager
def joined(meeting: Path, rank: int, size: int) -> Iterator[Team]:
    """Meet the others at the file `meeting`, which is new for each start."""
    if size == 1:
        yield Team()
        return
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = meeting.absolute().as_uri()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield Team(rank, size)
    finally:
        dist.destroy_process_group()


def start(target: Any, count: int, *arguments: Any) -> None:
    """Start processes 1 to `count` - 1 as `target(rank, *arguments)`; they end with this one."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    for rank in range(1, count):
        context.Process(target=target, args=(rank, *arguments), daemon=True).start()
