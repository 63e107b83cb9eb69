"""compose: a running state carried over a chain of segments, all layers in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.registry import MODELS, Case, Model
from benchmarks.kernels.stored import KEPT, STORED, as_stored, rows_of, transition_of
from sglang_hybrid_kernels.compose import compose

SEGMENTS = 8


def _inputs(model: Model, stored: torch.dtype, layers: int, tree_groups: int, by_row: bool) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        heads, k = model.value_heads, model.head_dim
        some = (1, 2) if small else (layers, SEGMENTS)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        made: dict[str, Any] = {"pool": random(some[0], 2, heads, k, k), "tree_groups": tree_groups}
        front: tuple[int, ...] = (*some, heads)
        made |= as_stored("end_state", random(*front, k, k), stored)
        if by_row:
            made["transition_rows"], count = rows_of(*front, device=device)
            front = (count,)
        made |= as_stored("transition", random(*front, k, k) * k**-0.5, stored)
        rows = {"source": [0], "destination": [1], "chain": list(range(some[1])), "chain_offsets": [0, some[1]]}
        return made | {name: torch.tensor(value, device=device) for name, value in rows.items()}

    return build


def _call(**inputs: Any) -> Tensor:
    compose(**inputs, check_slots=False)
    return inputs["pool"]


def _batched_matmul(
    pool: Tensor, transition: Tensor, end_state: Tensor, chain: Tensor, transition_rows: Tensor | None = None, **_: Any
) -> Tensor:
    """The chain in PyTorch: one batched multiply-add per segment, the state through memory each time."""
    state = pool[:, 0].flatten(0, 1)
    for entry in range(chain.numel()):
        both = transition_of(transition, transition_rows, slice(None), entry), end_state[:, entry]
        t, s = (x.flatten(0, 1).to(pool.dtype) for x in both)
        state = torch.baddbmm(s, state, t)
    pool[:, 1] = state.unflatten(0, pool[:, 1].shape[:2])
    return pool


def _case(model: Model, stored: torch.dtype, layers: int, tree_groups: int, by_row: bool = False) -> Case:
    matrix = layers * model.value_heads * model.head_dim**2
    kept = matrix // KEPT if by_row else matrix  # the other heads need the last end state only
    scale = 4 / model.head_dim if stored is torch.int8 else 0
    name = f"{model.name} {str(stored).removeprefix('torch.')} layers={layers} tree_groups={tree_groups}"
    return Case(
        operation="compose",
        name=name + " by rows" * by_row,
        inputs=_inputs(model, stored, layers, tree_groups, by_row),
        call=_call,
        tolerance=1e-4,
        moved_bytes=int((SEGMENTS * 2 * kept + matrix - kept) * (stored.itemsize + scale)) + 4 * (kept + matrix),
        flops=SEGMENTS * 2 * kept * model.head_dim,
        heads=(-3,),
        baselines={} if stored is torch.int8 else {"torch.baddbmm per segment": _batched_matmul},
    )


CASES = [
    *(_case(model, stored, model.linear_layers, 1) for model in MODELS for stored in STORED),
    *(_case(MODELS[0], torch.bfloat16, 1, groups) for groups in (1, 4)),
    *(_case(MODELS[0], stored, MODELS[0].linear_layers, 1, by_row=True) for stored in STORED),
    _case(MODELS[0], torch.bfloat16, 1, 4, by_row=True),
]
