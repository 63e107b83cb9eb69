"""FLOPs per token are twice the weights that transformers' own modules hold, plus a small share for mixing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.core.layers import Moe
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.spec import from_config, preset

SCRIPT = Path(__file__).with_name("transformers_weights.py")
# Billions of parameters on the model cards; dimensions that miss them are not those of the model.
PUBLISHED_TOTAL = {
    "qwen3-next-80b-a3b": 80,
    "qwen3.5-35b-a3b": 35,
    "qwen3.5-27b": 27,
    "nemotron-h-8b": 8.1,
    "nemotron-3-nano-30b-a3b": 31.6,
    "jamba-1.5-mini": 52,
    "falcon-h1-7b": 7.6,
    "granite-4.0-h-small": 32,
    "mamba-codestral-7b": 7.3,
    "falcon-mamba-7b": 7.0,
    "lfm2-1.2b": 1.17,
    "lfm2-8b-a1b": 8.3,
    "minimax-text-01": 456,
    "llama-3.1-8b": 8.0,
    "qwen3-30b-a3b": 30.5,
}
NOT_IN_TRANSFORMERS = {"kimi-linear-48b-a3b", "minicpm-sala", "ring-mini-linear-2.0", "zaya1-8b"}
BUILT = [name for name in PUBLISHED if name not in NOT_IN_TRANSFORMERS]
BAMBA = {
    "model_type": "bamba",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}


@pytest.fixture(scope="module")
def transformers_says() -> dict[str, dict[str, float]]:
    """Weights of every published model, and of a tiny Bamba, from one process."""
    configs = [dict(PUBLISHED[name]) for name in BUILT] + [BAMBA]
    done = subprocess.run([sys.executable, str(SCRIPT)], input=json.dumps(configs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip([*BUILT, "bamba"], json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", BUILT)
def test_active_weights_are_those_of_the_modules(name: str, transformers_says: dict[str, dict[str, float]]) -> None:
    # The rest is norms, biases, decay and skip vectors: at most 0.2 % at real size.
    assert preset(name).active_weights == pytest.approx(transformers_says[name]["active"], rel=2e-3)


def test_bamba_weights_are_those_of_the_modules(transformers_says: dict[str, dict[str, float]]) -> None:
    assert from_config(BAMBA).active_weights == pytest.approx(transformers_says["bamba"]["active"], rel=2e-2)


@pytest.mark.parametrize("name", PUBLISHED_TOTAL)
def test_preset_dimensions_give_the_published_size(name: str, transformers_says: dict[str, dict[str, float]]) -> None:
    assert transformers_says[name]["total"] / 1e9 == pytest.approx(PUBLISHED_TOTAL[name], rel=0.025)


@pytest.mark.parametrize("name", PUBLISHED)
def test_linear_flops_are_twice_the_active_weights_and_a_little(name: str) -> None:
    spec = preset(name)
    assert 1.0 <= spec.flops_per_token / (2 * spec.active_weights) < 1.05


def parameters(name: str, embeddings: int) -> float:
    """Billions, with so many matrices of embeddings, from our own formulas: no module to compare with."""
    spec = preset(name)
    idle = sum(
        (layer.experts - layer.top_k) * 3 * (layer.latent or layer.hidden) * layer.intermediate
        for layer in spec.layers
        if isinstance(layer, Moe)
    )
    config = PUBLISHED[name]
    return float(spec.active_weights + idle + embeddings * config["vocab_size"] * config["hidden_size"]) / 1e9


@pytest.mark.parametrize(
    ("name", "embeddings", "total"),
    [
        ("kimi-linear-48b-a3b", 2, 49.1),  # of the weights' index
        ("minicpm-sala", 2, 9.477),  # 18,076.38 MiB in bfloat16
        ("ring-mini-linear-2.0", 2, 16.4),  # of its model card
        ("zaya1-8b", 0, 8.4),  # of its model card, which seems not to count them: 8.8 with
    ],
)
def test_models_that_transformers_lacks_have_their_published_size(name: str, embeddings: int, total: float) -> None:
    assert parameters(name, embeddings) == pytest.approx(total, rel=0.015)


def test_active_parameters_of_models_that_transformers_lacks() -> None:
    """3B of Kimi-Linear with one of its two embeddings, 760M of ZAYA1 without."""
    kimi = preset("kimi-linear-48b-a3b").active_weights + 163840 * 2304
    assert kimi / 1e9 == pytest.approx(3, rel=0.05)
    assert preset("zaya1-8b").active_weights / 1e6 == pytest.approx(760, rel=0.02)
