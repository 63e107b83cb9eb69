"""Byte costs equal the sizes SGLang's own code computes and allocates, for every family SGLang serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.spec import from_config

SCRIPT = Path(__file__).with_name("sglang_pool_sizes.py")
NOT_IN_SGLANG = {"jamba", "zamba2"}

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
    "nemotron-h": {
        "model_type": "nemotron_h",
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
CASES: dict[str, tuple[dict[str, Any], int]] = {
    f"{name}, tp {tp}": (dict(config), tp)
    for name, config in [*PUBLISHED.items(), *TINY.items()]
    for tp in (1, 2, 4)
    if config["model_type"] not in NOT_IN_SGLANG
}


@pytest.fixture(scope="module")
def sglang_says() -> dict[str, dict[str, Any]]:
    """SGLang's answer to every case, from one process."""
    cases = [{"config": config, "tp": tp} for config, tp in CASES.values()]
    done = subprocess.run([sys.executable, str(SCRIPT)], input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bytes_per_token_and_per_state_are_sglangs(name: str, sglang_says: dict[str, dict[str, Any]]) -> None:
    config, tp = CASES[name]
    spec = from_config(config, tp=tp)
    theirs = sglang_says[name]
    ours = {"conv": spec.conv_bytes, "temporal": spec.temporal_bytes, "kv": spec.kv_bytes_per_token}
    assert ours == {key: theirs[key] for key in ours}
    if "pool_slot" in theirs:
        assert spec.checkpoint_bytes == theirs["pool_slot"]


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_grid_is_sglangs(name: str, sglang_says: dict[str, dict[str, Any]]) -> None:
    config, tp = CASES[name]
    spec = from_config(config, tp=tp)
    if spec.is_recurrent:
        assert spec.chunk_tokens == (sglang_says[name]["chunk"] or 64)
    else:
        assert spec.chunk_tokens == 1


def test_small_states_were_really_allocated(sglang_says: dict[str, dict[str, Any]]) -> None:
    assert sum("pool_slot" in answer for answer in sglang_says.values()) >= 20
