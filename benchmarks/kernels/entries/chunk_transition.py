"""chunk_transition: the operators of one cold segment, one layer, beside two passes of the prefill's own rule."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.prefills import fla_prefill, fla_two_prefills, sglang_prefill
from benchmarks.kernels.registry import MODELS, QWEN3_NEXT, Case, Model, Prepared
from sglang_hybrid_kernels.chunk_transition import chunk_transition

TOKENS = 1024
FAMILIES = {"gdn": (True, False), "kda": (True, True), "mamba2": (False, False), "gla": (False, True)}
"""Delta rule, decay by key channel."""


def _inputs(
    model: Model,
    family: str,
    dtype: torch.dtype,
    stored: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    small: bool,
) -> dict[str, Any]:
    tokens, entries = (160, 2) if small else (TOKENS, 64)
    heads, d = model.value_heads, model.head_dim
    delta, diagonal = FAMILIES[family]
    key_heads = model.key_heads if family == "gdn" else 1 if family == "mamba2" else heads

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def empty(*tail: int, of: torch.dtype = stored) -> Tensor:
        return torch.zeros(entries, heads, *tail, dtype=of, device=device)

    tail = [d, d] if delta else [d] if diagonal else []
    inputs = {
        "k": torch.nn.functional.normalize(randn(tokens, key_heads, d), dim=-1).to(dtype),
        "v": randn(tokens, heads, d).to(dtype),
        "g": -0.02 * randn(tokens, heads, *[d] * diagonal).abs(),
        "beta": randn(tokens, heads).sigmoid(),
        "cu_seqlens": torch.tensor([0, tokens], device=device),
        "entries": torch.tensor([1], device=device),
        "end_state": empty(d, d),
        "transition": empty(*tail, of=stored if delta else torch.float32),
        "vanishing": torch.zeros(entries, heads, dtype=torch.bool, device=device),
        "delta": delta,
    }
    if stored == torch.int8:
        inputs |= {f"{name}_scale": empty(d, of=torch.float32) for name in ("end_state", "transition")}
    return inputs


def _call(**inputs: Any) -> tuple[Tensor, ...]:
    """Eight-bit entries are compared by their values: one step of int8 is far above the tolerance."""
    chunk_transition(**inputs, check_slots=False)
    scales = [inputs.get(f"{name}_scale") for name in ("end_state", "transition")]
    stored = [inputs["end_state"], inputs["transition"]]
    return tuple(x if s is None else x * s.unsqueeze(-2) for x, s in zip(stored, scales, strict=True))


def _two_passes(**inputs: Any) -> tuple[Tensor, ...]:
    """Once from zero, once from the identity with nothing to write: how HYPIC's paper makes an entry."""
    start = torch.eye(inputs["k"].shape[2], device=inputs["k"].device).expand(inputs["transition"].shape)
    silent = torch.zeros(inputs["v"].shape[0], inputs["v"].shape[1], start.shape[-1], device=start.device)
    shared = {name: inputs[name] for name in ("k", "g", "beta", "cu_seqlens", "entries", "delta")}
    first = torch.tensor([0], device=start.device)
    chunk_transition(v=inputs["v"], end_state=inputs["end_state"], check_slots=False, **shared)
    chunk_transition(
        v=silent.to(inputs["v"].dtype),
        end_state=inputs["transition"],
        initial=start[:1].contiguous(),
        initial_slots=first,
        check_slots=False,
        **shared,
    )
    return inputs["end_state"], inputs["transition"]


def _flops(model: Model, family: str) -> int:
    """Two per multiply-add: solving (delta rule), then reading and writing [S | T] or S."""
    d, chunk = model.head_dim, 64
    per_token = chunk * (d + chunk // 2 + 2 * d) + 2 * d * 2 * d if FAMILIES[family][0] else d * d
    return 2 * TOKENS * model.value_heads * per_token


def _moved_bytes(model: Model, family: str, element_bytes: int, stored_bytes: int) -> int:
    """Tokens in, W and U out and in (delta rule), entries out."""
    delta, diagonal = FAMILIES[family]
    d, heads = model.head_dim, model.value_heads
    rows = TOKENS * heads * d * element_bytes * (2 + 4 * delta) + TOKENS * heads * 4 * (d if diagonal else 1)
    return rows + heads * d * d * stored_bytes * (1 + delta)


_BASELINES = {
    "our two passes": _two_passes,
    "one plain prefill, FLA": fla_prefill,
    "two plain prefills, FLA": fla_two_prefills,
    "one plain prefill, SGLang": Prepared(sglang_prefill),
}

CASES = [
    Case(
        "chunk_transition",
        f"{model.name} {family} {str(dtype)[6:]} into {str(stored)[6:]}",
        partial(_inputs, model, family, dtype, stored),
        _call,
        tolerance,
        _moved_bytes(model, family, dtype.itemsize, stored.itemsize),
        _flops(model, family),
        baselines=_BASELINES if (family, stored) == ("gdn", torch.float32) else {},
        heads=(-3, -3 if FAMILIES[family][0] else -2 if FAMILIES[family][1] else -1),
    )
    for model, family, dtype, stored, tolerance in (
        *((model, "gdn", torch.bfloat16, torch.bfloat16, 0.02) for model in MODELS),
        (QWEN3_NEXT, "gdn", torch.bfloat16, torch.float32, 0.02),
        (QWEN3_NEXT, "gdn", torch.float32, torch.float32, 1e-4),
        (QWEN3_NEXT, "gdn", torch.bfloat16, torch.int8, 0.02),
        (QWEN3_NEXT, "kda", torch.bfloat16, torch.bfloat16, 0.02),
        (QWEN3_NEXT, "mamba2", torch.bfloat16, torch.bfloat16, 0.02),
        (QWEN3_NEXT, "gla", torch.bfloat16, torch.bfloat16, 0.02),
    )
]
