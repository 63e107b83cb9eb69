"""Page ids on their way between the device and the host, where pools are kept; the scheduler waits for neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid.memory.supply import AtHand, Copy, Ids

Begin = Callable[[torch.Tensor], Copy]
"""Begins to copy an integer tensor, which must not change any more."""


class OnHost(AtHand):
    """Ids that were there all along."""

    def __init__(self, pages: torch.Tensor) -> None:
        super().__init__(pages.numpy())


class FromDevice:
    """Ids that go to pinned memory on a stream of their own.

    SGLang frees pages on the scheduler's stream, which waits for the batch that runs; so does the copy, but the
    scheduler goes on. The source is kept until the copy is read, so that nobody else gets its memory before.
    """

    at_once = False

    def __init__(self, pages: torch.Tensor, stream: Any) -> None:
        cuda = torch.cuda
        stream.wait_stream(cuda.current_stream(pages.device))
        self._source = pages
        self._ids = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
        with cuda.stream(stream):
            self._ids.copy_(pages, non_blocking=True)
        self._event = stream.record_event()

    def done(self) -> bool:
        return bool(self._event.query())

    def ids(self) -> Ids:
        self._event.synchronize()
        return self._ids.numpy()


def begin_on(device: torch.device) -> Begin:
    """How copies of ids on `device` are begun."""
    if device.type == "cpu":
        return OnHost
    stream = torch.cuda.Stream(device)
    return lambda pages: FromDevice(pages, stream)


def send(ids: Ids, device: torch.device) -> torch.Tensor:
    """`ids` on `device`, int64, ordered before later work of the current stream.

    From pinned memory: a copy from any other may wait for the stream, and with it for the batch that runs.
    """
    if device.type == "cpu":
        return torch.from_numpy(ids.copy())
    staged = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)  # torch keeps it until the copy has ended
    staged.numpy()[:] = ids
    return staged.to(device, non_blocking=True)
