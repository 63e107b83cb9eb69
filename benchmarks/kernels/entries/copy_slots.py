"""copy_slots: copy-on-match within SGLang's pools, and the ways into and out of a smaller checkpoint pool."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import copies
from benchmarks.kernels.registry import MODELS, Case, Model, Prepared
from sglang_hybrid_kernels.copy_slots import copy_slots

PAIRS = 4


def _pools(
    model: Model, dtype: torch.dtype, device: torch.device, generator: torch.Generator, small: bool
) -> list[Tensor]:
    """As SGLang's MambaPool keeps them. Small: fewer slots, and every layer the same numbers."""
    slots, layers = (2, 1) if small else (64, model.linear_layers)
    like = {"generator": generator, "device": device}
    temporal = torch.randn(layers, slots, model.value_heads, model.head_dim, model.head_dim, **like).to(dtype)
    conv = torch.randn(layers, slots, model.conv_channels, model.conv_width - 1, **like).bfloat16()
    return [x.repeat(model.linear_layers, *[1] * (x.dim() - 1)) if small else x for x in (temporal, conv)]


def _pairs(pools: list[Tensor], device: torch.device) -> dict[str, Tensor]:
    count = min(PAIRS, pools[0].shape[1] // 2)
    order = torch.randperm(pools[0].shape[1], generator=torch.Generator().manual_seed(1)).to(device)
    return {"source": order[:count], "destination": order[count : 2 * count]}


def _within(
    model: Model, dtype: torch.dtype, device: torch.device, generator: torch.Generator, small: bool
) -> dict[str, Any]:
    pools = _pools(model, dtype, device, generator, small)
    return {"pools": pools, **_pairs(pools, device)}


def _page_major(
    model: Model, dtype: torch.dtype, device: torch.device, generator: torch.Generator, small: bool
) -> dict[str, Any]:
    """As elastic memory keeps them: all layers of a slot side by side, windows before states."""
    temporal, conv = _pools(model, dtype, device, generator, small)
    sizes = [x[:, 0].numel() * x.element_size() for x in (conv, temporal)]
    slots = torch.empty(temporal.shape[1], sum(sizes), dtype=torch.uint8, device=device).split(sizes, 1)
    pools = [
        raw.view(x.dtype).unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1).copy_(x)
        for raw, x in zip(slots, (conv, temporal), strict=True)
    ]
    return {"pools": pools[::-1], **_pairs(pools, device)}


def _across(
    model: Model,
    dtype: torch.dtype,
    into_dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    small: bool,
) -> dict[str, Any]:
    pools = _pools(model, dtype, device, generator, small)
    into = [torch.zeros_like(pools[0], dtype=into_dtype), torch.zeros_like(pools[1])]
    inputs: dict[str, Any] = {"pools": pools, "into": into, **_pairs(pools, device)}
    if torch.int8 in (dtype, into_dtype):
        scale = torch.rand(*pools[0].shape[:-2], 1, pools[0].shape[-1], generator=generator, device=device) + 0.5
        inputs["into_scales" if into_dtype == torch.int8 else "scales"] = [scale, None]
    return inputs


def _call(**inputs: Any) -> tuple[Tensor, ...]:
    copy_slots(**inputs, check_slots=False)
    into = inputs.get("into", inputs["pools"])
    return tuple(into) + tuple(scale for scale in inputs.get("into_scales", ()) if scale is not None)


def _slot_bytes(model: Model, element_bytes: float) -> float:
    state = model.value_heads * model.head_dim**2 * element_bytes
    return model.linear_layers * (state + model.conv_channels * (model.conv_width - 1) * 2)


_INT8 = 1 + 4 / MODELS[0].head_dim
"""Bytes per element of an int8 state with a float32 scale per column."""

CASES = [
    Case(
        "copy_slots",
        f"{model.name} float32 {where}",
        partial(inputs, model, torch.float32),
        _call,
        0.0,
        int(PAIRS * 2 * _slot_bytes(model, 4)),
        baselines={
            "PyTorch, gather and scatter": copies.gather_scatter,
            "PyTorch, slot by slot": Prepared(copies.slot_by_slot),
            "SGLang, track_mamba_states_all_layers": copies.sglang_tracking,
            "SGLang, fused_copy_conv_slots and gather": Prepared(copies.sglang_copy_on_match),
        },
    )
    for inputs, where in ((_within, "within"), (_page_major, "within page-major"))
    for model in MODELS
] + [
    Case(
        "copy_slots",
        f"{MODELS[0].name} {str(dtype)[6:]} to {str(into_dtype)[6:]}",
        partial(_across, MODELS[0], dtype, into_dtype),
        _call,
        0.0,
        int(PAIRS * (_slot_bytes(MODELS[0], width) + _slot_bytes(MODELS[0], into_width))),
    )
    for dtype, width, into_dtype, into_width in (
        (torch.float32, 4, torch.bfloat16, 2),
        (torch.bfloat16, 2, torch.float32, 4),
        (torch.float32, 4, torch.int8, _INT8),
        (torch.int8, _INT8, torch.float32, 4),
    )
]
