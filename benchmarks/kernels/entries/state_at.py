"""state_at: branch and tail of one prompt, beside the prefill they come from."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.prefills import fla_prefill, mamba2_prefill, mamba_ssm_prefill, sglang_prefill
from benchmarks.kernels.registry import MODELS, QWEN3_NEXT, Case, Model, Prepared
from sglang_hybrid_kernels.state_at import state_at

TOKENS = 8192
POSITIONS = (3001, 8191)
"""Tokens into the prompt, none on the chunk grid: 57 and 63 tokens into their chunks."""


def _inputs(
    model: Model, family: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator, small: bool
) -> dict[str, Any]:
    """One layer. kda decays by key channel; v_new stands for solved values; mamba2 has more channels than states."""
    tokens = 192 if small else TOKENS
    positions = tuple(p % tokens for p in POSITIONS)
    heads, d = model.value_heads, model.head_dim
    key_heads = {"gdn": model.key_heads, "v_new": model.key_heads, "kda": heads, "mamba2": 1}[family]
    dv = 64 if family == "mamba2" else d

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    slots = torch.arange(len(positions), device=device)
    return {
        "h": (randn(tokens // 64, heads, dv, d) * 0.1).to(dtype),
        "k": torch.nn.functional.normalize(randn(tokens, key_heads, d), dim=-1).to(dtype),
        "v": randn(tokens, heads, dv).to(dtype),
        "g": -0.05 * randn(tokens, heads, *[d] * (family == "kda")).abs(),
        "beta": None if family == "v_new" else randn(tokens, heads).sigmoid(),
        "cu_seqlens": torch.tensor([0, tokens], device=device),
        "sequence": torch.zeros_like(slots),
        "position": torch.tensor(positions, device=device),
        "into": torch.zeros(len(positions) + 1, heads, dv, d, device=device),
        "slots": slots,
        "delta": family in ("gdn", "kda"),
    }


def _call(**inputs: Any) -> Tensor:
    state_at(**inputs, check_slots=False)
    return inputs["into"]


def _moved_bytes(model: Model, element_bytes: int) -> int:
    """States in and out, and the tokens since their chunks' starts."""
    past = sum(position % 64 for position in POSITIONS)
    state = model.value_heads * model.head_dim**2
    row = (model.value_heads + model.key_heads) * model.head_dim * element_bytes + model.value_heads * 8
    return len(POSITIONS) * state * (element_bytes + 4) + past * row


def _flops(model: Model) -> int:
    """Decay, read, write: three multiply-adds per element of the state and token."""
    return 6 * sum(position % 64 for position in POSITIONS) * model.value_heads * model.head_dim**2


_BASELINES = {
    "gdn": {"the prefill itself, FLA": fla_prefill, "the prefill itself, SGLang": Prepared(sglang_prefill)},
    "mamba2": {
        "the prefill itself, SGLang": Prepared(mamba2_prefill(tracked=False)),
        "the prefill with its tracked states, SGLang": Prepared(mamba2_prefill(tracked=True)),
        "the prefill itself, mamba-ssm": Prepared(mamba_ssm_prefill),
    },
}

CASES = [
    Case(
        "state_at",
        f"{model.name} {family} {str(dtype)[6:]}",
        partial(_inputs, model, family, dtype),
        _call,
        1e-5,
        _moved_bytes(model, dtype.itemsize),
        _flops(model),
        baselines=_BASELINES.get(family, {}),
        heads=(-3,),
    )
    for model, family, dtype in (
        *((model, "gdn", torch.bfloat16) for model in MODELS),
        (QWEN3_NEXT, "gdn", torch.float32),
        (QWEN3_NEXT, "v_new", torch.bfloat16),
        (QWEN3_NEXT, "kda", torch.bfloat16),
        (QWEN3_NEXT, "mamba2", torch.bfloat16),
    )
]
