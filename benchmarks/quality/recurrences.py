"""Other recurrences in place of a reader's own: what an approximation of a cache does to its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from sglang_hybrid.demo.reader.network.delta import DeltaLayer
from sglang_hybrid.demo.reader.network.ssd import SsdLayer

Rule = Callable[..., tuple[Tensor, Tensor]]
"""`gated_delta_rule` or `state_space`: inputs, and perhaps a state to begin with, to outputs and the last state."""


@contextmanager
def replaced(network: nn.Module, other: Callable[[Rule], Rule]) -> Iterator[None]:
    """Inside, every recurrent layer of `network` follows `other` of its rule."""
    places: list[tuple[Any, str]] = [
        (module, "rule" if isinstance(module, DeltaLayer) else "space")
        for module in network.modules()
        if isinstance(module, DeltaLayer | SsdLayer)
    ]
    own = [getattr(module, name) for module, name in places]
    for (module, name), rule in zip(places, own, strict=True):
        setattr(module, name, other(rule))
    try:
        yield
    finally:
        for (module, name), rule in zip(places, own, strict=True):
            setattr(module, name, rule)
