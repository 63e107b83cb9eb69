"""seam_attention: one attention layer of a request assembled from cached segments, all seams in one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.attentions import flashinfer_paged, masked, sglang_extend
from benchmarks.kernels.registry import MODELS, QWEN3_NEXT, Case, Model, Prepared
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
        heads=(-2,),
        baselines={
            "PyTorch, scaled_dot_product_attention with a mask": masked,
            "SGLang, extend attention with a mask": Prepared(sglang_extend),
            "FlashInfer, paged prefill with a mask": Prepared(flashinfer_paged),
        },
    )


CASES = [*(_case(model, 16) for model in MODELS), *(_case(QWEN3_NEXT, segments) for segments in (1, 64))]
