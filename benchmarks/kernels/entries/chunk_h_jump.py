"""chunk_h_jump: one linear layer of a request that is assembled from cached segments, seam tokens run between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.registry import MODELS, QWEN3_NEXT, Case, Model
from benchmarks.kernels.stored import KEPT, STORED, as_stored, rows_of, transition_of
from sglang_hybrid_kernels.chunk_h_jump import chunk_h_jump

SEAM, QUERY = 16, 64
"""Tokens run at a seam (eight on each side), and behind the last segment."""


def _inputs(model: Model, seams: int, size: int, stored: torch.dtype, by_row: bool) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        heads, k, rows = model.value_heads, model.head_dim, 2 if small else seams + 1
        lengths = [SEAM] * (rows - 1) + [QUERY]
        tokens = sum(lengths)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        key = torch.nn.functional.normalize(random(tokens, model.key_heads, k), dim=-1)
        row_starts = torch.tensor([0, *lengths], device=device).cumsum(0)
        index = {"cu_seqlens": row_starts, "request_rows": [0, rows], "jump": list(range(rows)), "slots": [1]}
        front: tuple[int, ...] = (rows, heads)
        segments = as_stored("end_state", random(*front, k, k), stored)
        if by_row:
            segments["transition_rows"], count = rows_of(*front, device=device)
            front = (count,)
        segments |= as_stored("transition", random(*front, k, k) * k**-0.5, stored)
        return {
            "k": key.bfloat16(),
            "w": (random(tokens, heads, k) * 0.1 * k**-0.5).bfloat16(),
            "u": random(tokens, heads, k).bfloat16(),
            "g": -0.1 * random(tokens, heads).abs(),
            "state": random(2, heads, k, k),
            **segments,
            "chunk_size": size,
            **{name: torch.as_tensor(value, device=device) for name, value in index.items()},
        }

    return build


def _call(chunks: int, **inputs: Any) -> tuple[Tensor, ...]:
    h, v_new = chunk_h_jump(**inputs, check_slots=False)
    return inputs["state"][1], v_new, h[:chunks]  # counted before: asking the device would wait for it


def _stock_rows(**inputs: Any) -> Tensor:
    """Without this kernel: SGLang's chunk recurrence once per row, a batched multiply-add for each jump."""
    from sglang.kernels.ops.attention.fla.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    state, slot = inputs["state"], torch.zeros(1, dtype=torch.int32, device=inputs["state"].device)
    running = state[1:2].clone()
    lengths = [SEAM] * (inputs["jump"].numel() - 1) + [QUERY]
    first = 0
    for row, length in enumerate(lengths):
        transition = transition_of(inputs["transition"], inputs.get("transition_rows"), row).float()
        running[0] = torch.baddbmm(inputs["end_state"][row].float(), running[0], transition)
        span = slice(first, first + length)
        k, w, u, g = (inputs[name][None, span] for name in ("k", "w", "u", "g"))
        chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, g=g, initial_state=running, initial_state_indices=slot)
        first += length
    return running


def _case(model: Model, seams: int, size: int, stored: torch.dtype, by_row: bool = False) -> Case:
    heads, k, rows = model.value_heads, model.head_dim, seams + 1
    tokens = SEAM * seams + QUERY
    chunks = seams * -(-SEAM // size) + -(-QUERY // size)
    matrix = heads * k * k
    transitions = matrix // KEPT if by_row else matrix
    scale = 4 / k if stored is torch.int8 else 0
    return Case(
        operation="chunk_h_jump",
        name=f"{model.name} seams={seams} chunk={size} {str(stored).removeprefix('torch.')}" + " by rows" * by_row,
        inputs=_inputs(model, seams, size, stored, by_row),
        call=partial(_call, chunks),
        tolerance=0.02,
        moved_bytes=(
            int(rows * (transitions + matrix) * (stored.itemsize + scale))  # operators
            + chunks * matrix * 2  # h
            + 2 * matrix * 4  # state
            + tokens * (heads * k * 3 * 2 + model.key_heads * k * 2 + heads * 4)  # w, u, v_new, k, g
        ),
        flops=rows * 2 * transitions * k + tokens * 4 * matrix,
        heads=(-3, -2, -3),
        baselines={} if stored is torch.int8 else {"SGLang, row by row": _stock_rows},
    )


CASES = [
    *(_case(model, 16, 16, torch.bfloat16) for model in MODELS),
    _case(QWEN3_NEXT, 16, 64, torch.bfloat16),
    _case(QWEN3_NEXT, 16, 16, torch.float32),
    _case(QWEN3_NEXT, 4, 16, torch.bfloat16),
    *(_case(QWEN3_NEXT, 16, 16, stored, by_row=True) for stored in STORED),
]
