"""What `spec` says a segment holds is what a server's buffer takes, laid out for the shapes of SGLang's pools."""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.core.layers import Attention, LatentAttention
from sglang_hybrid.core.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from sglang_hybrid.core.segments import STATE_DTYPES, segment_costs
from sglang_hybrid.core.spec import ModelSpec, preset
from sglang_hybrid.engine.segments.store import STORED, Shapes, Store

MODELS = {
    "qwen3-next-80b-a3b": 8, "qwen3.5-35b-a3b": 2, "qwen3.5-27b": 4, "nemotron-h-8b": 4, "falcon-h1-7b": 2,
    "granite-4.0-h-small": 2, "kimi-linear-48b-a3b": 4,
}  # fmt: skip


def of_sglang(spec: ModelSpec, tp: int) -> Shapes:
    """The shapes of one of `tp` ranks, from the functions with which SGLang sizes its own pools."""
    from sglang.srt.configs.mamba_utils import KimiLinearStateShape, Mamba2StateShape

    if any(isinstance(layer, LatentAttention) for layer in spec.layers):
        delta = [layer for layer in spec.layers if isinstance(layer, KimiDeltaAttention)]
        latent = [layer for layer in spec.layers if isinstance(layer, LatentAttention)]
        one = delta[0]
        kimi = KimiLinearStateShape.create(
            tp_world_size=tp, num_heads=one.heads, head_dim=one.head_dim, conv_kernel_size=one.conv_kernel
        )
        ((taps, channels),) = kimi.conv
        return Shapes(
            linear_layers=len(delta), temporal=tuple(kimi.temporal), window=(channels, taps),
            window_dtype=torch.bfloat16, dense=True, attention_layers=len(latent), kv_heads=1,
            key_size=latent[0].kv_rank + latent[0].rope_dim, value_size=0, kv_dtype=torch.bfloat16,
        )  # fmt: skip
    linear = [layer for layer in spec.layers if isinstance(layer, GatedDeltaNet | Mamba2)]
    attention = [layer for layer in spec.layers if isinstance(layer, Attention)]
    assert len(set(linear)) == len(set(attention)) == 1, "all layers of a kind are alike"
    one, its = linear[0], attention[0]
    if isinstance(one, GatedDeltaNet):
        sizes = (one.v_heads * one.v_dim, one.k_heads, one.v_heads, one.v_dim, one.k_dim)
    else:
        sizes = (one.inner, one.groups, one.heads, one.head_dim, one.state)
    width, groups, heads, head_dim, state = sizes
    shape = Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=width, n_groups=groups, num_heads=heads, head_dim=head_dim,
        state_size=state, conv_kernel=one.conv_kernel,
    )  # fmt: skip
    (window,) = shape.conv
    return Shapes(
        linear_layers=len(linear), temporal=tuple(shape.temporal), window=tuple(window), window_dtype=torch.bfloat16,
        dense=isinstance(one, GatedDeltaNet), attention_layers=len(attention), kv_heads=max(1, its.kv_heads // tp),
        key_size=its.head_dim, value_size=its.head_dim, kv_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name, most in MODELS.items() for tp in (1, most)])
def test_a_segment_costs_what_its_blocks_take(name: str, tp: int, dtype: str) -> None:
    spec = preset(name)
    costs = segment_costs(spec.per_rank(tp), dtype)
    store = Store(of_sglang(spec, tp), dtype, 3 * costs.block_bytes, torch.device("meta"))
    assert (store.state_bytes, store.token_bytes) == (costs.state_bytes, costs.token_bytes)
    assert (store.transitions, store.transition_bytes) == (costs.transitions, costs.transition_bytes)
    assert (store.block_tokens, store.block_bytes) == (costs.block_tokens, costs.block_bytes)
    assert store.blocks.transitions.cut.slots == costs.block_transitions
    assert costs.window == store.shapes.window[1]


def test_they_are_stored_in_the_same_ways() -> None:
    assert {name: dtype.itemsize for name, dtype in STORED.items()} == dict(STATE_DTYPES)
