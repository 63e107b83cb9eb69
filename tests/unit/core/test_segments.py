"""What segments cost, by their definition: T, S_C, windows and KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import LatentAttention
from sglang_hybrid.core.segments import segment_costs
from sglang_hybrid.core.spec import PRESETS, preset

MIB = 2**20


def test_qwen3_next() -> None:
    """36 layers of 32 heads with T [128, 128] and S_C [128, 128], 8,192 channels of 3 tokens; 12 of 2 heads of 256."""
    spec = preset("qwen3-next-80b-a3b")
    costs = segment_costs(spec)
    states, windows, rows = 36 * 32 * 128 * 128 * 2, 36 * 8192 * 3 * 2, 36 * 32 * 8
    assert states == 36 * MIB
    assert costs.state_bytes == states + windows + rows
    assert costs.whole_bytes == costs.state_bytes + states, "T is as large as S_C"
    assert (costs.transitions, costs.transition_bytes) == (36 * 32, 128 * 128 * 2)
    assert costs.block_transitions == costs.block_bytes // 32768 >= 36 * 32, "those of one fit into a block"
    assert costs.token_bytes * 1024 == 24 * MIB
    assert costs.block_tokens == -(-costs.state_bytes // 24576) == 1609
    assert costs.window == 3
    assert costs.jump_flops == 36 * 32 * 2 * 128**3
    assert costs.jump_flops < spec.prefill_flops(1), "a reuse computes less than a token, beside its seams"
    scales, int8, float32 = 36 * 32 * 128 * 4, segment_costs(spec, "int8"), segment_costs(spec, "float32")
    assert (int8.state_bytes, int8.transition_bytes) == (states // 2 + windows + rows + scales, 128 * (128 + 4))
    assert (float32.state_bytes, float32.transition_bytes) == (2 * states + windows + rows, 128 * 128 * 4)


def test_a_transition_of_mamba_2_is_a_number_for_each_head() -> None:
    spec = preset("nemotron-h-8b")
    costs = segment_costs(spec, "float32")
    layers = spec.layer_counts["mamba2"]
    states = layers * 128 * 64 * 128 * 4
    windows = spec.conv_bytes
    assert costs.state_bytes == costs.whole_bytes == states + windows + layers * 128 * 4
    assert (costs.transitions, costs.transition_bytes) == (0, 0)
    assert costs.jump_flops == layers * 128 * 2 * 64 * 128


def test_kimi_linear() -> None:
    """20 layers of 32 heads with T [128, 128] and S_C [128, 128], 12,288 channels of 3 tokens; 7 latents of 576."""
    costs = segment_costs(preset("kimi-linear-48b-a3b"))
    states, windows, rows = 20 * 32 * 128 * 128 * 2, 20 * 3 * 4096 * 3 * 2, 20 * 32 * 8
    assert costs.state_bytes == states + windows + rows
    assert (costs.transitions, costs.transition_bytes) == (20 * 32, 128 * 128 * 2)
    assert costs.token_bytes == 7 * 576 * 2, "what is kept of a token serves as key and value"
    assert (costs.window, costs.jump_flops) == (3, 20 * 32 * 2 * 128**3)


@pytest.mark.parametrize(("name", "its"), [("qwen3-next-80b-a3b", 2), ("kimi-linear-48b-a3b", 1)])
def test_a_rank_holds_its_share(name: str, its: int) -> None:
    """Of KV too, but every rank has all of a latent."""
    spec = preset(name)
    whole, rank = segment_costs(spec), segment_costs(spec.per_rank(2))
    assert 2 * rank.state_bytes == whole.state_bytes
    assert 2 * rank.transitions == whole.transitions
    assert its * rank.token_bytes == whole.token_bytes
    assert 2 * rank.jump_flops == whole.jump_flops


def test_latents_that_turn_with_their_position_have_no_segments() -> None:
    spec = preset("kimi-linear-48b-a3b")
    layers = tuple(replace(each, rotary=True) if isinstance(each, LatentAttention) else each for each in spec.layers)
    with pytest.raises(ConfigError, match="MLA only without positions"):
        segment_costs(replace(spec, layers=layers))


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "falcon-mamba-7b", "mamba-codestral-7b", "lfm2-8b-a1b", "ring-mini-linear-2.0",
             "jamba-1.5-mini"]
)  # fmt: skip
def test_other_models_have_no_segments(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"gated delta rules, .* or Mamba-2 beside it: {name}"):
        segment_costs(PRESETS[name])


def test_what_a_user_gets_wrong() -> None:
    with pytest.raises(ConfigError, match=r"only the total costs of this model are known.*: marconi-7b"):
        segment_costs(preset("marconi-7b"))
    with pytest.raises(ConfigError, match="one of bfloat16, int8, float32: float16"):
        segment_costs(preset("qwen3-next-80b-a3b"), "float16")
