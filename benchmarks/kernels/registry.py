"""What is compiled, checked and timed: every module in `entries/` lists its operation's cases in CASES.

A case is one call of an operation at one shape. `compile.py` compiles every kernel the call launches, `run.py` checks
the call against the naive path and times it against the roofline and other people's kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ENTRIES = Path(__file__).with_name("entries")


@dataclass(frozen=True)
class Model:
    """The recurrent and attention layers of a model whose shapes the cases use (per tensor-parallel rank, TP 1)."""

    name: str
    linear_layers: int
    value_heads: int
    key_heads: int
    head_dim: int
    conv_channels: int
    conv_width: int
    attention_layers: int
    query_heads: int
    kv_heads: int
    attention_dim: int
    rotary_dim: int


QWEN3_NEXT = Model("Qwen3-Next-80B-A3B", 36, 32, 16, 128, 8192, 4, 12, 16, 2, 256, 64)
QWEN35 = Model("Qwen3.5-35B-A3B", 30, 32, 16, 128, 8192, 4, 10, 16, 2, 256, 64)
MODELS = (QWEN3_NEXT, QWEN35)


@dataclass(frozen=True)
class Prepared:
    """A baseline with work that is not timed: prepare(**inputs) returns the call, which may return the result."""

    prepare: Callable[..., Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One call of an operation at one shape.

    inputs(device, generator, small) builds the keyword arguments; `small` keeps every dimension that kernels are
    compiled for and shrinks others (slots, tokens), for compiling and for a machine without a GPU.
    call(**inputs) runs the operation and returns what is compared, a tensor or a tuple of tensors; on Triton and on
    the naive path it must agree to `tolerance` (relative to the largest element; 0 demands equal bits). `heads` names
    the axis of heads of each result, or of all, from the end; each head must agree by its own norm. `moved_bytes` and
    `flops` are what the mathematics needs at least. `baselines` are other people's ways to the same result, tried where
    they import; inputs are built anew for each.
    """

    operation: str
    name: str
    inputs: Callable[[torch.device, torch.Generator, bool], dict[str, Any]]
    call: Callable[..., Any]
    tolerance: float
    moved_bytes: int
    flops: int = 0
    baselines: Mapping[str, Callable[..., Any] | Prepared] = field(default_factory=dict)
    heads: tuple[int, ...] = ()


def cases(operation: str | None = None) -> list[Case]:
    """Cases of one operation, or of all, in the order of the files."""
    found = []
    for file in sorted(ENTRIES.glob("*.py")):
        if operation in (None, file.stem):
            found += importlib.import_module(f"benchmarks.kernels.entries.{file.stem}").CASES
    return found
