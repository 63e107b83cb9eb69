"""conv_window_at: branch and tail of one prompt; inputs channels first, as SGLang's convolution takes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.prefills import causal_conv1d_prefill
from benchmarks.kernels.registry import MODELS, Case, Model, Prepared
from sglang_hybrid_kernels.conv_window_at import conv_window_at

POSITIONS = (2, 191)


def _inputs(model: Model, device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
    tokens = 192 if small else 8192
    x = torch.randn(tokens, model.conv_channels, generator=generator, device=device).bfloat16()
    pool = torch.randn(4, model.conv_channels, model.conv_width - 1, generator=generator, device=device).bfloat16()
    slots = torch.arange(len(POSITIONS), device=device)
    return {
        "x": x,
        "cu_seqlens": torch.tensor([0, tokens], device=device),
        "sequence": torch.zeros_like(slots),
        "position": torch.tensor(POSITIONS, device=device),
        "into": pool,
        "slots": slots,
        "initial": pool,
        "initial_slots": torch.tensor([3], device=device),
    }


def _call(**inputs: Any) -> Tensor:
    conv_window_at(**inputs, check_slots=False)
    return inputs["into"]


CASES = [
    Case(
        "conv_window_at",
        model.name,
        partial(_inputs, model),
        _call,
        0.0,
        len(POSITIONS) * 2 * model.conv_channels * (model.conv_width - 1) * 2,
        baselines={"the convolution itself, causal-conv1d": Prepared(causal_conv1d_prefill)},
    )
    for model in MODELS
]
