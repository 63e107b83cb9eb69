"""rerotate_scatter: cached segments brought to their places in a new text, all attention layers in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.registry import MODELS, QWEN3_NEXT, Case, Model
from sglang_hybrid_kernels.rerotate_scatter import rerotate_scatter

SEGMENT = 1024
DELTAS = (37, 5000, -800, 12345, 64, -3, 999, 250000)


def _inputs(model: Model, segments: int) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        layers, length = (2, 16) if small else (model.attention_layers, SEGMENT)
        tokens, shape = segments * length, (model.kv_heads, model.attention_dim)

        def pool(slots: int) -> list[Tensor]:
            made = torch.randn(layers, slots, *shape, generator=generator, device=device).bfloat16()
            return [layer.clone() for layer in made]

        order = torch.randperm(tokens, generator=generator, device=device)
        channel = torch.arange(0, model.rotary_dim, 2, device=device, dtype=torch.float64)
        return {
            "source_k": pool(tokens),
            "destination_k": pool(tokens + 1),
            "source_v": pool(tokens),
            "destination_v": pool(tokens + 1),
            "source": order,
            "destination": torch.arange(1, tokens + 1, device=device),
            "delta": torch.tensor(DELTAS[:segments], device=device),
            "segment_offsets": torch.arange(0, tokens + 1, length, device=device),
            "inverse_frequencies": 1e7 ** (-channel / model.rotary_dim),
        }

    return build


def _call(**inputs: Any) -> tuple[Tensor, ...]:
    rerotate_scatter(**inputs, check_slots=False)
    return *inputs["destination_k"], *inputs["destination_v"]


def _by_layer(source: Tensor, destination: Tensor, delta: Tensor, segment_offsets: Tensor, **pools: Any) -> Any:
    """PyTorch: gather, turn and scatter, one layer after the other."""
    segment = torch.bucketize(torch.arange(source.numel(), device=source.device), segment_offsets[1:], right=True)
    angle = (delta.double()[:, None] * pools["inverse_frequencies"])[segment, None]
    cos, sin = angle.cos().float(), angle.sin().float()
    half = cos.shape[-1]
    for k, into in zip(pools["source_k"], pools["destination_k"], strict=True):
        x = k[source]
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
        into[destination] = torch.cat([turned, x[..., 2 * half :]], -1)
    for v, into in zip(pools["source_v"], pools["destination_v"], strict=True):
        into[destination] = v[source]
    return *pools["destination_k"], *pools["destination_v"]


def _case(model: Model, segments: int) -> Case:
    elements = segments * SEGMENT * model.attention_layers * model.kv_heads * model.attention_dim
    return Case(
        operation="rerotate_scatter",
        name=f"{model.name} segments={segments} tokens={segments * SEGMENT}",
        inputs=_inputs(model, segments),
        call=_call,
        tolerance=2**-8,
        moved_bytes=2 * 2 * elements * 2 + segments * SEGMENT * 16,
        flops=6 * elements * model.rotary_dim // model.attention_dim // 2,
        heads=(-2,),
        baselines={"PyTorch, layer by layer": _by_layer},
    )


CASES = [*(_case(model, 8) for model in MODELS), _case(QWEN3_NEXT, 1)]
