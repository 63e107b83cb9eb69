"""seam_attention: one attention layer of a request assembled from cached segments, all seams in one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.registry import MODELS, QWEN3_NEXT, Case, Model
from sglang_hybrid_kernels.seam_attention import seam_attention

SEGMENT, SEAM = 1024, 16


def _inputs(model: Model, segments: int) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        count, segment = (2, 32) if small else (segments, SEGMENT)
        length, width = count * segment, SEAM // 2 if small else SEAM

        def random(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, model.attention_dim, generator=generator, device=device).bfloat16()

        seam = torch.arange(width, device=device)
        positions = (torch.arange(0, length, segment, device=device)[:, None] + seam).flatten()
        return {
            "q": random(positions.numel(), model.query_heads),
            "k": random(length, model.kv_heads),
            "v": random(length, model.kv_heads),
            "pages": torch.randperm(length, generator=generator, device=device),
            "page_offsets": torch.tensor([0, length], device=device),
            "positions": positions,
            "query_offsets": torch.tensor([0, positions.numel()], device=device),
            "longest": SEGMENT * segments,
        }

    return build


def _call(**inputs: Any) -> Tensor:
    return seam_attention(**inputs, check_slots=False)


def _masked(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """PyTorch: keys gathered, one call with a mask of queries times keys."""
    mask = torch.arange(pages.numel(), device=q.device) <= positions[:, None]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k[pages], v[pages]))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _case(model: Model, segments: int) -> Case:
    tokens, keys = segments * SEAM, segments * SEGMENT
    seen = SEAM * SEGMENT * segments * (segments - 1) // 2 + segments * SEAM * (SEAM + 1) // 2
    return Case(
        operation="seam_attention",
        name=f"{model.name} segments={segments} tokens={keys}",
        inputs=_inputs(model, segments),
        call=_call,
        tolerance=2**-6,
        moved_bytes=2 * model.attention_dim * 2 * (keys * model.kv_heads + tokens * model.query_heads),
        flops=4 * seen * model.query_heads * model.attention_dim,
        baselines={"torch scaled_dot_product_attention with a mask": _masked},
    )


CASES = [*(_case(model, 16) for model in MODELS), *(_case(QWEN3_NEXT, segments) for segments in (1, 64))]
