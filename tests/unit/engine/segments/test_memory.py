"""What composed passes take beside the pools, of published models: SGLang leaves free what its own passes take."""

from __future__ import annotations

import functools
from array import array

import numpy as np
import pytest
import torch

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine.cpu.attention import rows
from sglang_hybrid.engine.pools import copies
from sglang_hybrid.engine.segments import latents
from sglang_hybrid.engine.segments.batch import Composed, PassBatch
from sglang_hybrid.engine.segments.draft import build
from sglang_hybrid.engine.segments.linear import LinearPass, Pools
from sglang_hybrid.engine.segments.store import Layer
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt
from sglang_hybrid.segment.slabs import Cut
from sglang_hybrid_kernels.chunk_h_jump import naive
from sglang_hybrid_kernels.chunk_h_jump.check import Plan
from tests.unit.engine.peak import Peak

SMALL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
META, WINDOW, MIB = torch.device("meta"), 3, 1 << 20
DOCUMENTS, DOCUMENT, QUESTION, PROMPTS = 16, 256, 70, 25

MODELS = {  # heads, key heads, V, K of a linear layer on one rank
    "Qwen3-Next-80B-A3B": ("delta", 32, 16, 128, 128),
    "Kimi-Linear-48B-A3B": ("kda", 32, 32, 128, 128),
    "Nemotron-H-47B": ("mamba2", 256, 8, 64, 256),
    "Falcon-H1-34B": ("mamba2", 32, 2, 128, 256),
    "Granite-4-H-Small": ("mamba2", 128, 1, 64, 128),
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index tensors have no values there, and the kernel makes what it returns."""

    def send(ids: np.ndarray, to: torch.device) -> torch.Tensor:
        return torch.empty(len(ids), dtype=torch.int64, device=to)

    def made(plan: Plan, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        h = plan.k.new_empty(chunks, *plan.state.shape[1:])
        return h, plan.u if plan.w is None else torch.empty_like(plan.u)

    monkeypatch.setattr(copies, "send", send)
    monkeypatch.setattr(naive, "chunk_h_jump", made)


@functools.cache
def composed() -> PassBatch:
    """A pass of 8,000 tokens: prompts of many kept documents, whose seams are rows of sixteen tokens."""
    index = SegmentIndex(Blocks(4000, Cut(100)), Costs(SMALL, 1000, 10))
    total = DOCUMENTS * DOCUMENT + QUESTION
    ranges = tuple((at, at + DOCUMENT) for at in range(0, total - QUESTION, DOCUMENT))
    made = []
    for row in range(-1, PROMPTS):  # the first computes the documents, in a pass before
        prompt = SegmentedPrompt(array("q", range(total)), ranges, Seams(8, WINDOW), Identity("test", 8, 8))
        assert prompt.begin(0, total, Limits(100_000, 100_000), index, 0.0) is not None
        slot = torch.empty((), dtype=torch.int64, device=META)
        made.append(Composed(row, prompt.commit(index), prompt.ids, slot, row))
    return build([0] * PROMPTS, [total] * PROMPTS, made[1:], 8192, WINDOW, META)


@pytest.mark.parametrize("model", MODELS)
def test_the_recurrence_of_short_rows_takes_a_bounded_share(model: str) -> None:
    family, heads, key_heads, value, key = MODELS[model]
    batch = composed()
    tokens = len(batch.linear.tokens)
    assert tokens == PROMPTS * (16 * DOCUMENTS + QUESTION)
    assert len(batch.linear.wide_lengths) == PROMPTS * (DOCUMENTS + 1), "a short row between two documents"

    def some(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=META)

    if family == "mamba2":
        kept = Layer(some(5, heads), some(5, heads, value, key), some(0))
    else:
        places = torch.empty(5, heads, dtype=torch.int64, device=META)
        kept = Layer(some(9, key, key), some(5, heads, value, key), some(0), places)
    q, k = (some(tokens, key_heads, key) for _ in range(2))
    g = some(tokens, heads, *[key] * (family == "kda"))
    pools, beta = Pools(some(0), some(9, heads, value, key)), None if family == "mamba2" else some(tokens, heads)
    with Peak() as peak:
        LinearPass(batch, None, META, None)._run(kept, pools, q, k, some(tokens, heads, value), g, beta)
    assert peak.bytes < 1536 * MIB, f"{peak.bytes / MIB:.0f} MiB"


def test_attention_over_latents_takes_a_bounded_share() -> None:
    """Of Kimi-Linear on one rank, over 262,144 tokens."""
    q, pool = (torch.empty(shape, device=META, dtype=torch.bfloat16) for shape in ((300, 32, 576), (300_000, 1, 576)))
    slots = torch.empty(262_144, dtype=torch.int64, device=META)
    with Peak() as peak:
        latents.attend(q, pool, pool[..., :512], slots, [(0, 16, 0, 2048), (16, 300, 0, 262_144)], 1.0)
    assert peak.bytes < 768 * MIB, f"{peak.bytes / MIB:.0f} MiB"


@pytest.mark.parametrize("elements", [1 << 26, 1 << 17, 1 << 12, 1])
def test_attention_over_latents_is_pytorchs(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys are taken at a time."""
    monkeypatch.setattr(latents, "ELEMENTS", elements)
    generator = torch.Generator().manual_seed(5)
    pool, q = torch.randn(900, 1, 24, generator=generator), torch.randn(330, 4, 24, generator=generator)
    slots = torch.randperm(900, generator=generator)[:700]
    stretches = [(0, 16, 0, 300), (16, 200, 0, 400), (200, 201, 400, 401), (201, 330, 400, 529)]
    found = latents.attend(q, pool, pool[..., :16], slots, stretches, 0.2)
    torch.testing.assert_close(found, rows(q, pool, pool[..., :16], slots, stretches, 0.2), atol=1e-5, rtol=1e-5)
