"""Layer costs against counts made by hand or by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.convolution import CompressedAttention, ShortConvolution
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import Attention, LatentAttention, Mlp, Moe
from sglang_hybrid.core.recurrent import (
    GatedDeltaNet,
    JetBlock,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    delta_rule_flops,
)

GDN = GatedDeltaNet(hidden=2048, k_heads=16, v_heads=32, k_dim=128, v_dim=128, conv_kernel=4)
SSD = Mamba2(hidden=4096, heads=128, head_dim=64, groups=1, state=128, conv_kernel=4, chunk=256)


@given(start=st.integers(0, 60), length=st.integers(0, 60), heads=st.integers(1, 4))
def test_attention_flops_count_every_visible_pair_once(start: int, length: int, heads: int) -> None:
    layer = Attention(hidden=8, heads=heads, kv_heads=1, head_dim=5)
    end = start + length
    pairs = sum(position + 1 for position in range(start, end))  # a query sees itself and all keys before it
    expected = 2 * layer.weights * length + 4 * heads * 5 * pairs
    assert layer.linear_flops * length + layer.pair_flops * (end**2 - start**2) == expected


def test_attention_weights_with_grouped_heads_gate_and_other_output_width() -> None:
    plain = Attention(hidden=64, heads=8, kv_heads=2, head_dim=16)
    assert plain.weights == 64 * 128 + 2 * 64 * 32 + 128 * 64
    gated = Attention(hidden=64, heads=8, kv_heads=2, head_dim=16, output_gate=True)
    assert gated.weights - plain.weights == 64 * 128
    wide = Attention(hidden=64, heads=8, kv_heads=2, head_dim=16, out=32, extra_weights=7)
    assert wide.weights == 64 * 128 + 2 * 64 * 32 + 128 * 32 + 7
    assert plain.kv_elements() == 2 * 2 * 16


def test_kv_heads_are_replicated_when_there_are_more_ranks() -> None:
    layer = Attention(hidden=64, heads=8, kv_heads=2, head_dim=16)
    assert [layer.kv_elements(tp) for tp in (1, 2, 4, 8)] == [64, 32, 32, 32]
    with pytest.raises(ConfigError, match=r"num_attention_heads=8: 3"):
        layer.kv_elements(3)


def test_latent_attention_keeps_one_vector_per_token_on_every_rank() -> None:
    layer = LatentAttention(hidden=64, heads=4, nope_dim=8, rope_dim=4, v_dim=6, kv_rank=16)
    assert layer.kv_elements() == layer.kv_elements(4) == 20
    assert layer.weights == 64 * 48 + 64 * 20 + 16 * 4 * 14 + 4 * 6 * 64
    low_rank = LatentAttention(hidden=64, heads=4, nope_dim=8, rope_dim=4, v_dim=6, kv_rank=16, q_rank=10)
    assert layer.weights - low_rank.weights == 64 * 48 - 10 * (64 + 48)
    assert layer.pair_flops == 4 * (8 + 4 + 6)


def test_gated_delta_net_of_qwen3_next() -> None:
    assert GDN.conv_width == 8192
    assert GDN.weights == 2048 * (8192 + 4096 + 64) + 4096 * 2048 + 4 * 8192
    assert GDN.temporal_elements() == 32 * 128 * 128
    assert GDN.conv_elements() == 8192 * 3
    assert GDN.mixing_flops == delta_rule_flops(32, 128, 128)
    assert delta_rule_flops(1, 128, 128) == pytest.approx(2 * 64 * 5 * 128 + 64 * 64 / 3 + 6 * 128 * 128)


def test_key_groups_are_replicated_when_ranks_do_not_divide_them() -> None:
    layer = GatedDeltaNet(hidden=8, k_heads=2, v_heads=8, k_dim=4, v_dim=4, conv_kernel=4)
    assert layer.conv_elements(2) == (2 * 2 * 4 + 32) // 2 * 3
    assert layer.conv_elements(4) == (2 * 4 * 4 + 32) // 4 * 3
    assert SSD.conv_elements(4) == (8192 + 2 * 4 * 128) // 4 * 3


def test_mamba2_state_uses_the_expanded_width() -> None:
    """Marconi's `2DN` bytes would be half of it."""
    assert SSD.temporal_elements() == 2 * 4096 * 128
    assert SSD.conv_elements() == (8192 + 256) * 3
    assert SSD.weights == 4096 * (2 * 8192 + 256 + 128) + 8192 * 4096 + 4 * 8448
    assert SSD.mixing_flops == 2 * 256 * (128 + 8192) + 4 * 8192 * 128


def test_mamba1_scan_and_projections_are_marconis_when_the_width_doubles() -> None:
    d, n = 4096, 128
    layer = Mamba1(hidden=d, inner=2 * d, state=n, dt_rank=d // 16, conv_kernel=4)
    assert layer.mixing_flops == 16 * d * n
    selection = 2 * d * (2 * (d // 16) + 2 * n)
    assert 2 * (layer.weights - selection - 4 * 2 * d) == 12 * d * d
    assert layer.temporal_elements(2) == d * n
    assert layer.conv_elements() == 2 * d * 3


def test_kimi_delta_attention_has_three_windows_and_low_rank_gates() -> None:
    layer = KimiDeltaAttention(hidden=64, heads=4, head_dim=8, conv_kernel=4)
    assert layer.weights == 4 * 64 * 32 + 2 * (64 * 8 + 8 * 32) + 64 * 4 + 3 * 4 * 32
    assert (layer.temporal_elements(), layer.conv_elements(2)) == (4 * 64, 3 * 16 * 3)


def test_feed_forward_weights() -> None:
    assert Mlp(64, 256).weights == 3 * 64 * 256
    assert Mlp(64, 256, gated=False, extra_weights=5).weights == 2 * 64 * 256 + 5
    sparse = Moe(64, 32, experts=16, top_k=4, shared_intermediate=48, shared_gate=True)
    assert sparse.weights == 64 * 16 + 4 * 3 * 64 * 32 + 3 * 64 * 48 + 64
    latent = Moe(64, 32, experts=16, top_k=4, gated=False, latent=16)
    assert latent.weights == 64 * 16 + 4 * 2 * 16 * 32 + 2 * 64 * 16


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (GDN, "linear_num_value_heads=32"),
        (SSD, "number of Mamba heads=128"),
        (Mamba1(8, 16, 4, 1, 4), "Mamba inner width=16"),
        (KimiDeltaAttention(8, 4, 4, 4), "num_heads=4"),
    ],
)
def test_ranks_that_do_not_divide_are_named(layer: GatedDeltaNet, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}: 7"):
        layer.temporal_elements(7)


def test_a_jet_block_has_taps_of_its_own_for_every_token() -> None:
    block = JetBlock(hidden=64, k_heads=4, v_heads=4, k_dim=8, v_dim=16, conv_kernel=4, reduction=8)
    projections = 64 * (32 + 32 + 64 + 64 + 4 + 4) + 64 * 64  # q, k, v, gate, a, b; output
    generator = 64 * 8 + 8 * (64 * 4)
    assert block.weights == projections + generator + 4 * 64
    assert (block.kind, block.temporal_elements(), block.conv_elements()) == ("gdn", 4 * 8 * 16, (32 + 32 + 64) * 3)


def test_kda_gates_of_full_rank() -> None:
    low = KimiDeltaAttention(hidden=64, heads=4, head_dim=8, conv_kernel=4)
    one = KimiDeltaAttention(hidden=64, heads=4, head_dim=8, conv_kernel=4, full_gate=True)
    both = KimiDeltaAttention(hidden=64, heads=4, head_dim=8, conv_kernel=4, full_gate=True, full_decay=True)
    more = 64 * 32 - (64 * 8 + 8 * 32)
    assert (one.weights - low.weights, both.weights - low.weights) == (more, 2 * more)
    assert both.temporal_elements() == low.temporal_elements()


def test_lightning_attention_counts_its_chunk_products() -> None:
    layer = LightningAttention(hidden=64, heads=4, head_dim=8, output_gate=True, chunk=16)
    assert layer.weights == 5 * 64 * 32
    in_chunk = 2 * 16 * 8 * 2  # Q K^T, and its product with V, of one token and head
    state = 2 * 8 * 8 * 2  # read and update
    assert layer.mixing_flops == 4 * (in_chunk + state)
    assert (layer.temporal_elements(), layer.temporal_elements(2), layer.conv_elements()) == (256, 128, 0)


def test_layers_that_keep_windows_only() -> None:
    short = ShortConvolution(hidden=64, conv_kernel=3)
    assert short.weights == 64 * 192 + 64 * 64 + 3 * 64
    assert (short.temporal_elements(), short.conv_elements(), short.conv_elements(2)) == (0, 128, 64)
    cca = CompressedAttention(hidden=64, heads=4, kv_heads=2, head_dim=8, kernels=(2, 3))
    projections = 64 * (32 + 16 + 16) + 32 * 64
    assert cca.weights == projections + 2 * 48 + 3 * 8 * 48
    assert (cca.kv_elements(), cca.kv_elements(2)) == (32, 16)
    assert (cca.conv_elements(), cca.conv_elements(2)) == (48 * 3 + 64, 24 * 3 + 64)
    with pytest.raises(ConfigError, match="num_query_groups=2: 4"):
        cca.conv_elements(4)


def test_a_router_of_several_matrices() -> None:
    assert Moe(8, 4, 3, 1, router=100).weights == 100 + 3 * 8 * 4
