"""The contract of ModelSpec: sums, ranks, dtypes, budgets, the printed block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core import spec as spec_module
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import KINDS
from sglang_hybrid.core.spec import (
    PRESETS,
    ModelSpec,
    describe,
    engine_dtypes,
    from_config,
    preset,
)

LAYERED = [name for name, spec in PRESETS.items() if spec.layers]
SUMS_ONLY = ModelSpec("sums", 100, 1000, 5.0, 0.5)


def test_marconi_7b_has_the_papers_numbers() -> None:
    spec = preset("marconi-7b")
    assert (spec.kv_bytes_per_token, spec.checkpoint_bytes) == (65_536, 26_787_840)
    assert spec.checkpoint_tokens == 408.75
    d, n, length = 4096, 128, 1000
    attention = 8 * length * d**2 + 4 * length**2 * d
    ssm = 12 * length * d**2 + 16 * length * d * n + 10 * length * d
    assert spec.prefill_flops(length) == 4 * attention + 28 * 16 * length * d**2 + 24 * ssm


def test_marconi_7b_windows_are_the_papers_share_of_the_state() -> None:
    """Appendix A.1: 6.1 % of the state size for the model used in the paper."""
    spec = preset("marconi-7b")
    assert spec.conv_bytes / spec.checkpoint_bytes == pytest.approx(0.061, abs=5e-4)


def test_qwen3_next_by_hand() -> None:
    spec = preset("qwen3-next-80b-a3b")
    assert spec.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert spec.temporal_bytes == 36 * 32 * 128 * 128 * 4
    assert spec.conv_bytes == 36 * 8192 * 3 * 2
    assert spec.layer_counts == {"gdn": 36, "attention": 12, "moe": 48}
    assert spec.chunk_tokens == 64


@given(name=st.sampled_from(sorted(PRESETS)), cuts=st.lists(st.integers(0, 100_000), min_size=3, max_size=3))
def test_prefill_flops_add_up_over_consecutive_pieces(name: str, cuts: list[int]) -> None:
    spec, (a, b, c) = PRESETS[name], sorted(cuts)
    assert spec.prefill_flops(c, a) == pytest.approx(spec.prefill_flops(b, a) + spec.prefill_flops(c, b))
    assert spec.prefill_flops(c, b) >= 0


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("tp", [1, 2])
def test_flops_of_the_layers_add_up(name: str, tp: int) -> None:
    spec = preset(name).per_rank(tp)
    assert spec.flops_per_token * tp == pytest.approx(sum(layer.linear_flops for layer in spec.layers))
    assert spec.flops_per_token_pair * tp == pytest.approx(sum(layer.pair_flops for layer in spec.layers))
    assert set(spec.layer_counts) <= set(KINDS)
    assert spec.prefill_flops(10) * tp == pytest.approx(preset(name).prefill_flops(10))


@pytest.mark.parametrize("name", LAYERED)
def test_ranks_together_hold_at_least_the_whole(name: str) -> None:
    ranks = 2 if name == "zaya1-8b" else 4  # the most that its two heads of keys are shared out to
    whole, rank = preset(name), preset(name).per_rank(ranks)
    assert ranks * rank.kv_bytes_per_token >= whole.kv_bytes_per_token
    assert ranks * rank.temporal_bytes == whole.temporal_bytes
    assert ranks * rank.conv_bytes >= whole.conv_bytes
    assert rank.per_rank(1) == whole


def test_dtypes_scale_the_part_they_store() -> None:
    spec = preset("qwen3-next-80b-a3b")
    half = spec.with_dtypes(state_dtype="bfloat16")
    assert (half.temporal_bytes * 2, half.conv_bytes) == (spec.temporal_bytes, spec.conv_bytes)
    assert spec.with_dtypes(conv_dtype="float32").conv_bytes == 2 * spec.conv_bytes
    assert spec.with_dtypes(kv_dtype="fp8_e4m3").kv_bytes_per_token * 2 == spec.kv_bytes_per_token
    assert half.per_rank(2).state_dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"float32.*'int3'"):
        spec.with_dtypes(kv_dtype="int3")


def test_engine_dtypes_follow_sglangs_environment() -> None:
    environ = {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16", "SGLANG_MAMBA_CONV_DTYPE": "float32", "OTHER": "float16"}
    assert engine_dtypes(environ) == {"state_dtype": "bfloat16", "conv_dtype": "float32"}
    assert engine_dtypes({"SGLANG_MAMBA_SSM_DTYPE": "int8"}) == {}


@given(
    name=st.sampled_from(sorted(PRESETS)),
    budget_bytes=st.integers(0, 2**38),
    states=st.none() | st.integers(0, 50),
    ratio=st.floats(0.0, 10.0),
)
def test_fit_uses_the_budget_and_not_more(name: str, budget_bytes: int, states: int | None, ratio: float) -> None:
    spec = PRESETS[name]
    if states is not None and states * spec.checkpoint_bytes > budget_bytes:
        with pytest.raises(ConfigError, match="larger budget"):
            spec.fit(budget_bytes, states)
        return
    found = spec.fit(budget_bytes, states, ratio)
    assert found.used_bytes == spec.bytes_for(found.tokens, found.states) <= budget_bytes
    if spec.kv_bytes_per_token:
        assert spec.bytes_for(found.tokens + 1, found.states) > budget_bytes
    if states is not None:
        assert found.states == states


def test_fit_splits_like_sglangs_static_ratio() -> None:
    """`--mamba-full-memory-ratio 0.9`: states get 0.9 / 1.9 of the budget."""
    found = preset("qwen3-next-80b-a3b").fit(40 * 10**9)
    assert found.states == int(40e9 * 0.9 / 1.9) // 77_266_944
    assert preset("llama-3.1-8b").fit(131_072 * 10) == spec_module.Capacity(10, 0, 1_310_720)
    assert preset("mamba-codestral-7b").fit(272_367_616 * 3).states == 3


@pytest.mark.parametrize("name", PRESETS)
def test_description_names_what_a_reader_needs(name: str) -> None:
    rows = dict(describe(preset(name)))
    assert rows["model"] == name
    assert f"{preset(name).kv_bytes_per_token:,} bytes" in rows["KV per token"]
    if preset(name).is_recurrent:
        assert f"{preset(name).checkpoint_bytes:,} bytes" in rows["state"]
    else:
        assert rows["state"].startswith("none")


def test_the_context_is_the_configurations() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    assert from_config(config).context_tokens == 0
    assert ("context", "not known") in describe(from_config(config))
    spec = from_config({**config, "max_position_embeddings": 4096}).per_rank(2)
    assert spec.context_tokens == 4096
    assert ("context", "4,096 tokens") in describe(spec)
    assert from_config({**config, "model_max_length": 1 << 20}).context_tokens == 1 << 20, "Kimi-Linear's name for it"
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        from_config({**config, "max_position_embeddings": 0})


def test_description_of_a_rank_says_so() -> None:
    assert ("costs are for", "one of 4 tensor-parallel ranks") in describe(preset("kimi-linear-48b-a3b").per_rank(4))


def test_sums_alone_cannot_be_split_or_stored_otherwise() -> None:
    for change in (lambda: SUMS_ONLY.per_rank(2), lambda: SUMS_ONLY.with_dtypes(kv_dtype="float16")):
        with pytest.raises(ConfigError, match=r"from_config: sums"):
            change()
    assert SUMS_ONLY.prefill_flops(10, 4) == 5.0 * 6 + 0.5 * (100 - 16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_bytes_per_token": -1},
        {"flops_per_token_pair": -1.0},
        {"conv_bytes": 1001},
        {"chunk_tokens": 0},
        {"tp": 0},
        {"context_tokens": -1},
    ],
)
def test_impossible_costs_are_refused(wrong: dict[str, int]) -> None:
    fields = {"kv_bytes_per_token": 1, "checkpoint_bytes": 1000, "flops_per_token": 1.0, "flops_per_token_pair": 0.0}
    with pytest.raises(ConfigError):
        ModelSpec("wrong", **{**fields, **wrong})


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"marconi-7b.*zamba2-7b, zaya1-8b: 'gpt-2'"):
        preset("gpt-2")


def test_prefill_flops_of_arrays_are_those_of_their_elements() -> None:
    spec = preset("qwen3-next-80b-a3b")
    ends, starts = np.array([1, 500, 1_000_000]), np.array([0, 499, 64])
    each = [spec.prefill_flops(end, start) for end, start in zip(ends.tolist(), starts.tolist(), strict=True)]
    assert spec.prefill_flops(ends, starts).tolist() == each
