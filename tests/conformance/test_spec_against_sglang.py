"""Byte costs equal the sizes SGLang's own code computes and allocates, for every family SGLang serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.families import FAMILIES, UNPRICED
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.served import ARCHITECTURES, Where
from sglang_hybrid.core.spec import ModelSpec, from_config
from sglang_hybrid.engine import compat
from tests.versions import since

SCRIPT = Path(__file__).with_name("sglang_pool_sizes.py")
NOT_IN_SGLANG = {"bailing_moe_linear", "jamba", "minimax", "zamba2"}

ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
DELTA = {
    **ATTENTION,
    "num_hidden_layers": 8,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "head_dim": 24,
    "num_experts": 0,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
SSD = {**ATTENTION, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_n_groups": 1}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LINEAR_ATTENTION = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
NEMOTRON = {
    **ATTENTION,
    "head_dim": 16,
    "hybrid_override_pattern": "M-M*E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 32,
    "mamba_ssm_dtype": "float16",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
JET = {
    "model_type": "jet_nemotron",
    **ATTENTION,
    "num_hidden_layers": 4,
    "layer_types": ["jet", "jet", "swa", "attn"],
    "efficient_attention_config": {
        "jet": {
            "mode": "chunk",
            "expand_v": 1.5,
            "num_heads": 4,
            "head_dim": 8,
            "norm_eps": "1e-5",
            "conv_size": 3,
            "dconv_generator_reduction": 4,
            "dconv_implementation": "triton",
        },
        "swa": {"window_size": 64},
    },
    "mamba_ssm_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "vocab_size": 320,
}
BAILING = {
    "model_type": "bailing_hybrid",
    **ATTENTION,
    **LATENT,
    "num_hidden_layers": 6,
    "layer_group_size": 3,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mamba_ssm_dtype": "bfloat16",  # not read by SGLang
}
SHORT_CONVOLUTION = {
    **ATTENTION,
    "num_hidden_layers": 4,
    "conv_L_cache": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
TINY: dict[str, dict[str, Any]] = {
    "qwen3-next": {"model_type": "qwen3_next", **DELTA},
    "qwen3-next, bfloat16 states": {"model_type": "qwen3_next", **DELTA, "mamba_ssm_dtype": "bfloat16"},
    "qwen3.5, nested": {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", **DELTA, "mamba_ssm_dtype": "bfloat16"},
    },
    "qwen3.5 experts": {
        "model_type": "qwen3_5_moe",
        "text_config": {"model_type": "qwen3_5_moe_text", **DELTA, "num_experts": 8},
    },
    "nemotron-h": {"model_type": "nemotron_h", **NEMOTRON},
    "nemotron-h puzzle": {
        "model_type": "nemotron_h_puzzle",
        **NEMOTRON,
        "block_configs": [*[{"block_type": "mamba"}] * 4, {"block_type": "moe", "n_routed_experts": 2}],
    },
    "falcon-h1": {
        "model_type": "falcon_h1",
        **SSD,
        "num_hidden_layers": 3,
        "mamba_d_ssm": 64,
        "mamba_d_head": 8,
        "mamba_chunk_size": 64,
        "mamba_ssm_dtype": "bfloat16",
    },
    "granite hybrid": {
        "model_type": "granitemoehybrid",
        **SSD,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "mamba_d_head": 16,
        "shared_intermediate_size": 32,
        "num_local_experts": 0,
        "mamba_ssm_dtype": "bfloat16",  # read by our caller, ignored by SGLang
    },
    "granite, attention only": {
        "model_type": "granitemoehybrid",
        **SSD,
        "num_hidden_layers": 2,
        "layer_types": ["attention", "attention"],
        "mamba_d_head": 16,
        "shared_intermediate_size": 32,
        "num_local_experts": 0,
    },
    "kimi-linear": {
        "model_type": "kimi_linear",
        **ATTENTION,
        "num_hidden_layers": 4,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
    },
    "kimi k3": {
        "model_type": "kimi_k3",
        "text_config": {
            "model_type": "kimi_linear",
            **ATTENTION,
            **LATENT,
            "num_hidden_layers": 4,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                **LINEAR_ATTENTION,
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "use_full_rank_gate": True,
            },
        },
    },
    "nemotron vision": {
        "model_type": "NemotronH_Nano_VL_V2",
        "vision_config": {},
        "llm_config": {
            "model_type": "nemotron_h",
            **NEMOTRON,
            "hybrid_override_pattern": "M-M*",
            "mamba_ssm_dtype": "bfloat16",
        },
    },
    "jet-nemotron": JET,
    "jet vision": {"model_type": "jet_vlm", "text_config": JET},
    "gigachat 3.5": {
        "model_type": "gigachat3_5",
        **ATTENTION,
        **LATENT,
        "num_hidden_layers": 4,
        "full_attention_layers": [1, 3],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 16,
        "mamba_ssm_dtype": "bfloat16",
    },
    "ling 2.5": BAILING,
    "ling 3": {
        **BAILING,
        "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": [1, 0, 1, 1, 0, 1],
        "short_conv_kernel_size": 3,
        "no_kda_lora": True,
    },
    "minicpm-sala": {
        "model_type": "minicpm_sala",
        **ATTENTION,
        "num_hidden_layers": 5,
        "head_dim": 24,
        "mixer_types": ["lightning", "attention"],
        "lightning_nh": 4,
        "lightning_nkv": 4,
        "lightning_head_dim": 8,
    },
    "lfm2": {"model_type": "lfm2", **SHORT_CONVOLUTION},
    "lfm2, indices": {
        "model_type": "lfm2",
        **SHORT_CONVOLUTION,
        "layer_types": None,
        "full_attn_idxs": [1, 2],
    },
    "lfm2 experts": {
        "model_type": "lfm2_moe",
        **SHORT_CONVOLUTION,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "lfm2 vision": {"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2", **SHORT_CONVOLUTION}},
    "zaya, listed": {
        "model_type": "zaya",
        **ATTENTION,
        "num_hidden_layers": 3,
        "zaya_layers": ["a", 4, "a", 4],
        "num_query_groups": 4,
        "num_key_value_heads": 4,
        "cca_num_q_heads": [8, 0, 8, 0],
        "kv_channels": 8,
        "head_dim": None,
        "cca_time0": 3,
        "ffn_hidden_size": 64,
        "num_experts": 4,
    },
    "intern s2": {
        "model_type": "intern_s2_preview",
        "text_config": {"model_type": "qwen3_5_moe_text", **DELTA, "num_experts": 8},
    },
    "intern s2 mobius": {
        "model_type": "interns2_mobius",
        "text_config": {"model_type": "interns2_mobius_text", **DELTA, "num_experts": 8},
    },
    "minicpm-v 4.6": {
        "model_type": "minicpmv4_6",
        "text_config": {"model_type": "qwen3_5_text", **DELTA, "mamba_ssm_dtype": "bfloat16"},
    },
    "mamba-2": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 64,
    },
    "mamba-1": {
        "model_type": "mamba",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "state_size": 8,
        "conv_kernel": 4,
    },
    "float32 transformer": {"model_type": "llama", **ATTENTION, "num_hidden_layers": 2, "torch_dtype": "float32"},
}
REFUSED = {("zaya1-8b", 4)}  # its attention asserts that ranks share out the heads of keys; the sizes do not
CASES: dict[str, tuple[dict[str, Any], int]] = {
    f"{name}, tp {tp}": (dict(config), tp)
    for name, config in [*PUBLISHED.items(), *TINY.items()]
    for tp in (1, 2, 4)
    if config["model_type"] not in NOT_IN_SGLANG and (name, tp) not in REFUSED
}


@pytest.fixture(scope="module")
def sglang() -> dict[str, Any]:
    """SGLang's answers to all cases, and what it serves, from one process."""
    cases = [{"config": config, "tp": tp} for config, tp in CASES.values()]
    started = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_MAMBA_")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(cases), capture_output=True, text=True, env=started
    )  # a test that read a server's settings may have left types of states behind
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture(scope="module")
def sglang_says(sglang: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """SGLang's answer to every case by its name."""
    return dict(zip(CASES, sglang["answers"], strict=True))


@pytest.fixture
def theirs(name: str, sglang_says: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What SGLang says of the case; only an old one may lack the model."""
    said = sglang_says[name]
    if "lacks" in said:
        (pytest.fail if compat.complete() else pytest.skip)(f"SGLang {compat.engine_version()} lacks {said['lacks']}")
    return said


def test_every_hybrid_architecture_of_sglang_is_in_the_table(sglang: dict[str, Any]) -> None:
    """docs/models.md is written from the table, and the launcher refuses by it."""
    hybrids = sglang["hybrids"]
    drafts = ("NextN", "MTP")
    unknown = [name for name in hybrids["architectures"] if name not in ARCHITECTURES and not name.endswith(drafts)]
    assert not unknown, "SGLang serves hybrid models that core/served.py has no row for; add them, and their costs"
    known = {*FAMILIES, *UNPRICED, *(f"{name}_text" for name in FAMILIES)}
    without = {name: kind for name, kind in hybrids["model_types"].items() if kind not in known}
    assert not without, "SGLang has configurations with states that core/families neither prices nor refuses"
    listed = {row.model_type for row in ARCHITECTURES.values()}
    assert listed <= {*FAMILIES, *UNPRICED}


@since("0.5.21", "some models of the table")
def test_the_table_says_what_this_sglang_serves(sglang: dict[str, Any]) -> None:
    later = {name for name, row in ARCHITECTURES.items() if "from SGLang 0.5.23" in row.note}
    for name, row in ARCHITECTURES.items():
        if name not in later:
            assert (row.where is not Where.SPEC) == (name in sglang["hybrids"]["served"]), name
        if row.where is Where.CPU:  # where the launcher asks
            assert row.extra_buffer == (name in sglang["hybrids"]["extra_buffer"]), name


@pytest.mark.parametrize("name", CASES)
def test_bytes_per_token_and_per_state_are_sglangs(name: str, theirs: dict[str, Any]) -> None:
    config, tp = CASES[name]
    spec = from_config(config, tp=tp)
    ours = {"conv": spec.conv_bytes, "temporal": spec.temporal_bytes, "kv": spec.kv_bytes_per_token}
    assert ours == {key: theirs[key] for key in ours}
    if "pool_slot" in theirs:
        assert spec.checkpoint_bytes == theirs["pool_slot"]


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_grid_is_sglangs(name: str, theirs: dict[str, Any]) -> None:
    config, tp = CASES[name]
    spec = from_config(config, tp=tp)
    if spec.is_recurrent:
        assert spec.chunk_tokens == (theirs["chunk"] or 64)
    else:
        assert spec.chunk_tokens == 1


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_a_server_has_gives_the_same_costs(name: str, theirs: dict[str, Any]) -> None:
    """`spec` reads config.json, a server what SGLang's configuration class made of it."""
    config, tp = CASES[name]
    assert costs(from_config(theirs["served"], tp=tp)) == costs(from_config(config, tp=tp))


def costs(spec: ModelSpec) -> tuple[object, ...]:
    return (spec.kv_bytes_per_token, spec.checkpoint_bytes, spec.conv_bytes, spec.chunk_tokens, spec.layers)


def test_small_states_were_really_allocated(sglang_says: dict[str, dict[str, Any]]) -> None:
    assert sum("pool_slot" in answer for answer in sglang_says.values()) >= 20
