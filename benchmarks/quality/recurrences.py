"""Other recurrences in place of a reader's own: what an approximation of a cache does to its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from sglang_hybrid.demo.reader.network.delta import DeltaLayer
from sglang_hybrid.demo.reader.network.layers import Recurrence
from sglang_hybrid.demo.reader.network.ssd import SsdLayer


@contextmanager
def replaced(network: nn.Module, other: Callable[[Recurrence], Recurrence]) -> Iterator[None]:
    """Inside, every recurrent layer of `network` follows `other` of its recurrence."""
    layers = [module for module in network.modules() if isinstance(module, DeltaLayer | SsdLayer)]
    own = [layer.recurrence for layer in layers]
    for layer in layers:
        layer.recurrence = other(layer.recurrence)
    try:
        yield
    finally:
        for layer, recurrence in zip(layers, own, strict=True):
            layer.recurrence = recurrence
