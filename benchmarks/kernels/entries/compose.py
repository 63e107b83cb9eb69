"""compose: a running state carried over a chain of segments, all layers in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.registry import MODELS, Case, Model
from sglang_hybrid_kernels.compose import compose

SEGMENTS = 8
BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}


def _inputs(model: Model, stored: torch.dtype, layers: int, tree_groups: int) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        heads, k = model.value_heads, model.head_dim
        some = (1, 2) if small else (layers, SEGMENTS)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        made: dict[str, Any] = {"pool": random(some[0], 2, heads, k, k), "tree_groups": tree_groups}
        for name, scale in (("transition", k**-0.5), ("end_state", 1.0)):
            values = random(*some, heads, k, k) * scale
            if stored is torch.int8:
                step = values.abs().amax(-2, keepdim=True) / 127
                made |= {name: (values / step).round().to(torch.int8), f"{name}_scale": step.squeeze(-2)}
            else:
                made[name] = values.to(stored)
        rows = {"source": [0], "destination": [1], "chain": list(range(some[1])), "chain_offsets": [0, some[1]]}
        return made | {name: torch.tensor(value, device=device) for name, value in rows.items()}

    return build


def _call(**inputs: Any) -> Tensor:
    compose(**inputs, check_slots=False)
    return inputs["pool"]


def _batched_matmul(pool: Tensor, transition: Tensor, end_state: Tensor, chain: Tensor, **_: Any) -> Tensor:
    """The chain in PyTorch: one batched multiply-add per segment, the state through memory each time."""
    state = pool[:, 0].flatten(0, 1)
    for entry in range(chain.numel()):
        t, s = (x[:, entry].flatten(0, 1).to(pool.dtype) for x in (transition, end_state))
        state = torch.baddbmm(s, state, t)
    pool[:, 1] = state.unflatten(0, pool[:, 1].shape[:2])
    return pool


def _case(model: Model, stored: torch.dtype, layers: int, tree_groups: int) -> Case:
    matrix = layers * model.value_heads * model.head_dim**2
    scales = 0 if stored is not torch.int8 else 8 * layers * model.value_heads * model.head_dim
    name = f"{model.name} {str(stored).removeprefix('torch.')} layers={layers} tree_groups={tree_groups}"
    return Case(
        operation="compose",
        name=name,
        inputs=_inputs(model, stored, layers, tree_groups),
        call=_call,
        tolerance=1e-4,
        moved_bytes=SEGMENTS * (2 * matrix * BYTES[stored] + scales) + 2 * 4 * matrix,
        flops=SEGMENTS * 2 * matrix * model.head_dim,
        heads=(-3,),
        baselines={} if stored is torch.int8 else {"torch.baddbmm per segment": _batched_matmul},
    )


CASES = [
    *(_case(model, stored, model.linear_layers, 1) for model in MODELS for stored in BYTES),
    *(_case(MODELS[0], torch.bfloat16, 1, groups) for groups in (1, 4)),
]
