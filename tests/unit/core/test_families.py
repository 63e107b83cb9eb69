"""Reading configurations: spellings that mean the same, and every mistake with the key that is wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.families import FAMILIES
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.spec import describe, from_config, preset

QWEN = dict(PUBLISHED["qwen3-next-80b-a3b"])
NEMOTRON = dict(PUBLISHED["nemotron-h-8b"])
GRANITE = dict(PUBLISHED["granite-4.0-h-small"])
FALCON = dict(PUBLISHED["falcon-h1-7b"])
LLAMA = dict(PUBLISHED["llama-3.1-8b"])
KIMI = dict(PUBLISHED["kimi-linear-48b-a3b"])
ZAMBA = dict(PUBLISHED["zamba2-7b"])
JAMBA = dict(PUBLISHED["jamba-1.5-mini"])
FULL = {"attention": "full_attention"}
LFM2 = dict(PUBLISHED["lfm2-1.2b"])
ZAYA = dict(PUBLISHED["zaya1-8b"])
SALA = dict(PUBLISHED["minicpm-sala"])
RING = dict(PUBLISHED["ring-mini-linear-2.0"])
LING = {**RING, "model_type": "bailing_hybrid"}
MINIMAX = dict(PUBLISHED["minimax-text-01"])
LINEAR = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
GLM = {
    "model_type": "glm5_next",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "index_topk": 2048,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_kpool": 4,
    "linear_attn_config": {"kda_layers": [0, 1, 2, 4, 5, 6], **LINEAR},
}
QWEN4 = {
    **QWEN,
    "model_type": "qwen4_exp",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
JET = {
    "model_type": "jet_nemotron",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "layer_types": ["jet", "attn"],
    "efficient_attention_config": {
        "jet": {"num_heads": 4, "head_dim": 8, "expand_v": 2.0, "conv_size": 4, "dconv_generator_reduction": 8}
    },
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def costs(config: dict[str, Any]) -> tuple[float, ...]:
    spec = from_config(config)
    return (spec.kv_bytes_per_token, spec.checkpoint_bytes, spec.flops_per_token, spec.flops_per_token_pair)


def test_mapping_file_and_folder_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    by_folder, by_file = from_config(folder), from_config(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.name == "my-model"
    assert from_config(QWEN, name="my-model") == by_folder
    assert from_config({**QWEN, "_name_or_path": "org/some"}).name == "org/some"
    assert from_config(QWEN).name == "qwen3_next"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (QWEN, {**QWEN, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}),
        (QWEN, without(QWEN, "full_attention_interval")),
        (QWEN, {**QWEN, "hidden_size": 2048.0}),
        (QWEN, {**QWEN, "mlp_only_layers": None}),
        (
            NEMOTRON,
            {
                **without(NEMOTRON, "hybrid_override_pattern", "n_groups", "conv_kernel", "chunk_size"),
                "layers_block_type": [
                    {"M": "mamba", "-": "mlp", "*": "attention"}[letter]
                    for letter in NEMOTRON["hybrid_override_pattern"]
                ],
                "mamba_n_groups": 8,
                "mamba_d_conv": 4,
                "mamba_chunk_size": 128,
            },
        ),
        (
            GRANITE,
            {**GRANITE, "layer_types": [t.replace("attention", "full_attention") for t in GRANITE["layer_types"]]},
        ),
        (FALCON, {**FALCON, "mamba_d_head": "auto"}),
        (LLAMA, {**LLAMA, "head_dim": 128}),
        (LLAMA, {**LLAMA, "torch_dtype": "float32"}),
        (JAMBA, {**JAMBA, "mamba_dt_rank": "auto"}),
        (ZAMBA, {**ZAMBA, "num_key_value_heads": 32, "attention_head_dim": 224}),
        (
            LFM2,
            {
                **without(LFM2, "full_attn_idxs", "block_ff_dim"),
                "layer_types": ["full_attention" if i in LFM2["full_attn_idxs"] else "short_conv" for i in range(16)],
                "intermediate_size": 12288,
            },
        ),
        (LFM2, {**LFM2, "block_ff_dim": 8192, "block_auto_adjust_ff_dim": False}),
        (ZAYA, {**ZAYA, "zaya_layers": ["a", 16] * 40, "num_hidden_layers": 3}),
        (ZAYA, {**without(ZAYA, "num_attention_heads"), "cca_num_q_heads": [8, 0] * 40}),
        (SALA, {**SALA, "mixer_types": [name.replace("minicpm4", "attn") for name in SALA["mixer_types"]]}),
        (LING, {**LING, "layer_group_size": ([1] * 4 + [0]) * 4}),
        (LING, without(LING, "num_experts", "num_shared_experts", "first_k_dense_replace")),
        (
            MINIMAX,
            {
                **without(MINIMAX, "layer_types"),
                "model_type": "minimax_text_01",
                "attn_type_list": [int(label == "full_attention") for label in MINIMAX["layer_types"]],
            },
        ),
        (KIMI, {"model_type": "kimi_k3", "text_config": KIMI}),
        (NEMOTRON, {**NEMOTRON, "mamba_n_groups": 3}),
        ({**QWEN, "num_experts": 0}, {**QWEN, "model_type": "qwen3_5_text"}),
    ],
)
def test_spellings_that_mean_the_same_model(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert costs(one) == costs(other)


def test_text_part_of_a_nested_config_is_read() -> None:
    nested = {"model_type": "qwen3_5", "text_config": QWEN, "vision_config": {"hidden_size": 9}}
    assert costs(nested) == costs(QWEN)


def test_dtypes_come_from_the_config_where_sglang_reads_them() -> None:
    assert from_config({**QWEN, "mamba_ssm_dtype": "bfloat16"}).state_dtype == "bfloat16"
    assert from_config({**GRANITE, "mamba_ssm_dtype": "bfloat16"}).state_dtype == "float32"
    assert from_config({**LLAMA, "dtype": "float16"}).kv_dtype == "float16"
    given = from_config(QWEN, name="q", kv_dtype="fp8_e5m2", state_dtype="float16", conv_dtype="float32", tp=2)
    stored = from_config(QWEN, name="q").with_dtypes(kv_dtype="fp8_e5m2", state_dtype="float16", conv_dtype="float32")
    assert given == stored.per_rank(2)
    assert (given.kv_dtype, given.state_dtype, given.conv_dtype, given.tp) == ("fp8_e5m2", "float16", "float32", 2)


def test_dense_and_sparse_feed_forward_layers_of_qwen() -> None:
    assert from_config({**QWEN, "mlp_only_layers": [0, 1]}).layer_counts["mlp"] == 2
    assert from_config({**QWEN, "decoder_sparse_step": 2}).layer_counts["moe"] == 24
    assert "moe" not in from_config({**QWEN, "num_experts": 0}).layer_counts
    ungated = from_config({**QWEN, "attn_output_gate": False})
    assert preset("qwen3-next-80b-a3b").active_weights - ungated.active_weights == 12 * 2048 * 16 * 256


def test_layers_of_the_other_families() -> None:
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert from_config(mixtral).layer_counts == {"attention": 32, "moe": 32}
    assert from_config({**KIMI, "moe_layer_freq": 2}).layer_counts["moe"] == 13
    assert from_config({**KIMI, "num_experts": 0}).layer_counts["mlp"] == 27
    assert from_config({**GRANITE, "num_local_experts": 0}).layer_counts["mlp"] == 40
    adapted = from_config({**ZAMBA, "use_shared_attention_adapter": True})
    assert adapted.active_weights - preset("zamba2-7b").active_weights == 13 * 3 * 2 * 128 * 2 * 3584


def test_layer_numbers_of_kimi_linear_start_at_one() -> None:
    assert preset("kimi-linear-48b-a3b").layer_counts == {"kda": 20, "attention": 7, "mlp": 1, "moe": 26}
    linear = {**KIMI["linear_attn_config"], "kda_layers": [1, 3]}
    kinds = [layer.kind for layer in from_config({**KIMI, "num_hidden_layers": 3, "linear_attn_config": linear}).layers]
    assert kinds == ["kda", "mlp", "attention", "moe", "kda", "moe"]


def test_sparse_attention_grows_with_the_prompt_by_its_index_alone() -> None:
    glm, qwen = from_config(GLM), from_config(QWEN4)
    assert glm.layer_counts == {"kda": 6, "attention": 2, "mlp": 3, "moe": 5}
    assert glm.flops_per_token_pair == 2 * 4 * 128 / 4
    assert qwen.flops_per_token_pair == 12 * 4 * 128 / 4
    assert qwen.flops_per_token_pair < from_config(QWEN).flops_per_token_pair / 50
    dense = from_config(without(GLM, "index_topk"))
    indexed = 1536 * 4 * 128 + 64 * (2 * 128 + 4)  # queries, keys, what pools them, weights of the heads
    assert glm.active_weights - dense.active_weights == 2 * indexed
    chosen = 2 * (2.0 * 4 * 2 * 512 * 2048 + 4 * 128 / 4) - 2 * 4 * (256 + 256)  # absorbed; not the dense diagonal
    assert glm.flops_per_token - dense.flops_per_token == 2 * 2 * indexed + chosen


def test_an_index_is_kept_beside_kv() -> None:
    glm, plain = from_config(GLM), from_config(without(GLM, "index_topk"))
    assert glm.kv_bytes_per_token - plain.kv_bytes_per_token == 2 * (128 + 4)
    assert glm.with_pooled_index().kv_bytes_per_token - plain.kv_bytes_per_token == 2 * 33
    assert from_config(QWEN4).kv_bytes_per_token - from_config(QWEN).kv_bytes_per_token == 12 * 128 * 2 // 4
    assert from_config(QWEN4).with_pooled_index() == from_config(QWEN4)
    assert (glm.is_beside, plain.is_beside, from_config(QWEN).is_beside) == (True, False, False)
    scaled = from_config(GLM, kv_dtype="fp8_e4m3").kv_bytes_per_token
    assert scaled == 2 * (512 + 132), "its type is its own"


def test_embeddings_of_ngrams_keep_a_window_and_the_last_tokens() -> None:
    plain = from_config(without(QWEN4, "indexer_n_heads"))
    two = from_config({**without(QWEN4, "indexer_n_heads"), "ple_layer_ids": [5, 2, 5, 99]})
    assert two.is_beside
    assert two.layer_counts["ngram"] == 2
    assert two.checkpoint_bytes - plain.checkpoint_bytes == 2 * (3 * 3 * 4 * 2048 * 2) + 2 * 8
    assert two.temporal_bytes == plain.temporal_bytes
    assert two.active_weights - plain.active_weights == 2 * (2048 * (4 * 2048 + 2048) + 4 * 4 * 2048)
    mixing = plain.active_weights - from_config(QWEN).active_weights
    assert mixing == 48 * 2 * 2048 * 4 * (2 * 320 + 4)


def test_feed_forward_layers_of_nemotron_have_no_gate() -> None:
    """Squared ReLU: two matrices, in the MLP, the experts and the shared expert."""
    mlp = from_config({**NEMOTRON, "hybrid_override_pattern": "-"})
    assert mlp.active_weights == 2 * 4096 * 21504
    sparse = from_config({**PUBLISHED["nemotron-3-nano-30b-a3b"], "hybrid_override_pattern": "E"})
    assert sparse.active_weights == 2688 * 128 + 6 * 2 * 2688 * 1856 + 2 * 2688 * 3712


def test_puzzle_gives_each_layer_experts_of_its_own() -> None:
    plain = {**PUBLISHED["nemotron-3-nano-30b-a3b"], "hybrid_override_pattern": "ME*E"}
    blocks = [{"block_type": kind} for kind in ("mamba", "moe", "attention", "moe")]
    puzzle = {**plain, "model_type": "nemotron_h_puzzle", "block_configs": blocks}
    assert from_config(puzzle).layers == from_config(plain).layers
    blocks[3] |= {"n_routed_experts": 64, "moe_intermediate_size": 928, "num_experts_per_tok": 3}
    saved = from_config(plain).active_weights - from_config(puzzle).active_weights
    assert saved == 2688 * (128 - 64) + 2 * 2688 * (6 * 1856 - 3 * 928)
    with pytest.raises(ConfigError, match=r"block_configs .*one for each of the 4 layers: 3"):
        from_config({**puzzle, "block_configs": blocks[:3]})
    with pytest.raises(ConfigError, match=r"block_configs .*a list of mappings"):
        from_config({**puzzle, "block_configs": None})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
            "GptOssForCausalLM.*lfm2.*qwen3_next.*'gpt_oss'",
        ),
        ({"hidden_size": 3}, r"architecture without model_type.*''"),
        ({"model_type": "qwen3_nest"}, r"near model types with costs are qwen3_next.*'qwen3_nest'"),
        ({"model_type": "inkling_model"}, r"no costs for inkling_model, whose sliding windows .*'inkling_model'"),
        ({**QWEN, "num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096: 1000000000"),
        (without(LFM2, "full_attn_idxs"), "layer_types must be a list of conv and full_attention: None"),
        ({**LFM2, "layer_types": ["mamba"] * 16}, "layer_types .*: 'mamba'"),
        ({**LFM2, "conv_L_cache": 1}, "conv_L_cache must be an integer of at least 2: 1"),
        ({**LFM2, "block_ffn_dim_multiplier": "1"}, "block_ffn_dim_multiplier must be a number above zero: '1'"),
        ({**LFM2, "block_ffn_dim_multiplier": float("nan")}, "block_ffn_dim_multiplier .*: nan"),
        (without(dict(PUBLISHED["lfm2-8b-a1b"]), "layer_types"), "layer_types"),
        ({**SALA, "mixer_types": ["mamba"]}, "mixer_types .*: 'mamba'"),
        ({**SALA, "mixer_types": ["attn"] * 33}, "mixer_types .* num_hidden_layers=32 names: 33"),
        ({**SALA, "lightning_nkv": 2}, "lightning_nkv must be lightning_nh=32: 2"),
        ({**RING, "layer_group_size": 0}, "layer_group_size must be an integer of at least 1: 0"),
        ({**RING, "num_experts_per_tok": -8}, "num_experts_per_token must be an integer of at least 1: -8"),
        ({**LING, "layer_group_size": [1, 0]}, r"layer_group_size .* num_hidden_layers=20: \[1, 0\]"),
        ({**LING, "layer_group_size": "5"}, "layer_group_size must be an integer of at least 1: '5'"),
        ({**ZAYA, "zaya_layers": "aa"}, "zaya_layers .*: 'aa'"),
        ({**ZAYA, "zaya_layers": ["a", None]}, "zaya_layers .*None"),
        (without(ZAYA, "ffn_hidden_size"), "ffn_hidden_size"),
        ({**ZAYA, "ffn_hidden_size_list": [0, "x"]}, "ffn_hidden_size_list must be an integer of at least 1: 'x'"),
        ({**MINIMAX, "layer_types": None}, "layer_types must be a list .* one per layer: None"),
        ({**MINIMAX, "layer_types": ["mamba"] * 80}, "layer_types .*: 'mamba'"),
        ({**JET, "efficient_attention_config": None}, "efficient_attention_config"),
        ({**JET, "efficient_attention_config": {"jet": 3}}, "jet must be a mapping: 3"),
        ({**JET, "layer_types": ["jet", "mamba"]}, "layer_types must be a list of jet, attn and swa: 'mamba'"),
        (without(JET, "layer_types"), "layer_types must be a list of jet, attn and swa: None"),
        (without(QWEN, "hidden_size"), "hidden_size"),
        (without(QWEN, "linear_num_key_heads"), "linear_num_key_heads"),
        ({**QWEN, "architectures": ["Mine"], "num_hidden_layers": None}, "config of Mine: .*num_hidden_layers"),
        ({**QWEN, "num_hidden_layers": "48"}, "num_hidden_layers must be an integer of at least 1: '48'"),
        ({**QWEN, "num_hidden_layers": True}, "num_hidden_layers .*: True"),
        ({**QWEN, "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim .* at least 2: 1"),
        ({**QWEN, "attn_output_gate": "yes"}, "attn_output_gate must be true or false: 'yes'"),
        ({**QWEN, "mamba_ssm_dtype": 16}, "mamba_ssm_dtype must be a string: 16"),
        ({**QWEN, "mamba_ssm_dtype": "int8"}, "'int8'"),
        ({**QWEN, "layer_types": ["linear_attention", 3]}, "layer_types must be a list of str"),
        ({**QWEN, "layer_types": ["linear_attention"]}, "num_hidden_layers must be the length of layer_types, 1: 48"),
        ({**QWEN, "layer_types": ["conv"] * 48}, "layer_types .*: 'conv'"),
        ({**QWEN, "architectures": "Qwen"}, "architectures must be a list of str: 'Qwen'"),
        ({"model_type": "qwen3_5", "text_config": [1]}, r"text_config must be a mapping: \[1\]"),
        ({**NEMOTRON, "hybrid_override_pattern": "M-X"}, "hybrid_override_pattern .*: 'M-X'"),
        (without(NEMOTRON, "hybrid_override_pattern"), "hybrid_override_pattern"),
        ({**NEMOTRON, "hybrid_override_pattern": "ME"}, "moe_intermediate_size|moe_shared"),
        ({**GRANITE, "mamba_n_heads": 100}, "number of Mamba heads .* 8192: 100"),
        (without(KIMI, "linear_attn_config"), "linear_attn_config"),
        (
            {**KIMI, "linear_attn_config": {"kda_layers": [1], "head_dim": 4}},
            "linear_attn_config.*num_heads",
        ),
        (without(ZAMBA, "layers_block_type"), "layers_block_type"),
        ({**ZAMBA, "layers_block_type": ["attention"] * 81}, "mamba and hybrid: 'attention'"),
        ({**LLAMA, "num_attention_heads": 33}, "num_attention_heads .*: 33"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding"),
    ],
)
def test_a_wrong_config_is_an_error_that_names_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a valid JSON"),
        ("[]", "JSON object, not a list"),
        (None, "model folder or a config.json that can be read"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"{message}.*{path}"):
        from_config(path)


HOSTILE = (None, "", "4", -1, 0, 1.5, True, [], {}, [None], [[1]], float("nan"), float("inf"), 10**9, 10**30)


def damaged(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`config` with one key, nested ones too, missing or of a wrong value."""
    for key, value in config.items():
        yield without(dict(config), key)
        yield from ({**config, key: wrong} for wrong in HOSTILE)
        if isinstance(value, Mapping):
            yield from ({**config, key: inner} for inner in damaged(value))


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_damaged_key_is_harmless_or_a_configuration_error(name: str) -> None:
    for config in [*damaged(PUBLISHED[name])][::2]:
        with contextlib.suppress(ConfigError):
            describe(from_config(config))


@pytest.mark.parametrize("config", [GLM, {**QWEN4, "ple_layer_ids": [2, 5]}], ids=["glm", "qwen4"])
def test_one_damaged_key_of_a_model_that_is_not_published_is_too(config: dict[str, Any]) -> None:
    for wrong in [*damaged(config)]:
        with contextlib.suppress(ConfigError):
            describe(from_config(wrong))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_names_the_first_key_it_misses(model_type: str) -> None:
    with pytest.raises(ConfigError, match=f"config of {model_type}: "):
        from_config({"model_type": model_type})
