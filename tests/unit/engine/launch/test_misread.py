"""Models that SGLang would read otherwise than transformers are refused before the start."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.engine.launch import arguments, flags, models
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.engine.launch.refusals import misread
from tests.engine.configs import QWEN3_NEXT, write

FALCON = {**PUBLISHED["falcon-h1-7b"], "architectures": ["FalconH1ForCausalLM"]}
GRANITE = {**PUBLISHED["granite-4.0-h-small"], "architectures": ["GraniteMoeHybridForCausalLM"]}
INFINITY = {"__float__": "Infinity"}
"""As transformers 5.12 writes it."""


def complete(folder: Path, *more: str) -> None:
    """What the launcher does with a command line."""
    rest = ["--model-path", str(folder), *more]
    namespace = flags.parse_engine(rest)
    arguments.complete(namespace, rest, HybridConfig(), models.inspect_model(namespace))


@pytest.mark.parametrize(
    ("config", "tensor", "why"),
    [
        ({"n_groups": 8}, "backbone.embeddings.weight", ""),
        ({"n_groups": 2, "mamba_n_groups": 2}, "backbone.embeddings.weight", ""),
        ({"n_groups": 2}, "backbone.embeddings.weight", '"mamba_n_groups": 2}.: n_groups 2$'),
        ({"n_groups": 8}, "backbone.embedding.weight", "rename the tensor backbone.embedding.weight"),
    ],
)
def test_what_sglang_misreads_of_nemotron_h(tmp_path: Path, config: dict[str, Any], tensor: str, why: str) -> None:
    save_file({tensor: np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    model = Model(str(tmp_path), {"architectures": ["NemotronHForCausalLM"], **config})
    namespace = flags.parse_engine(["--model-path", str(tmp_path)])
    with pytest.raises(ConfigError, match=why) if why else nullcontext():
        misread.check(namespace, model)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": False}, ""),
        ({"mamba_rms_norm": False, "mamba_norm_before_gate": True}, ""),
        ({"mamba_proj_bias": True, "projectors_bias": True}, ""),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate true"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": None}, "mamba_norm_before_gate true"),
        ({"projectors_bias": True}, "not served: mamba_proj_bias false, projectors_bias true"),
        ({"mamba_proj_bias": True}, "not served: mamba_proj_bias true, projectors_bias false"),
        ({"attention_bias": True}, "not served: attention_bias true"),
        ({"mlp_bias": True}, "not served: mlp_bias true"),
    ],
)
def test_falcon_h1(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    """Each of these was answered wrongly, by the comparison of a small one with transformers."""
    config = {key: value for key, value in {**FALCON, **changed}.items() if value is not None}
    with pytest.raises(ConfigError, match=f"{why}$") if why else nullcontext():
        complete(write(tmp_path, config))


@pytest.mark.parametrize("config", [FALCON, GRANITE], ids=["falcon", "granite"])
@pytest.mark.parametrize(
    ("limit", "served"),
    [
        (None, True),
        ([0.0, INFINITY], True),
        ([0.0, float("inf")], True),
        ([0.0, 0.1], False),
        ([0.001, INFINITY], False),
    ],
)
def test_bounds_of_steps(tmp_path: Path, config: dict[str, Any], limit: list[Any] | None, served: bool) -> None:
    folder = write(tmp_path, {**config, "time_step_limit": limit})
    with nullcontext() if served else pytest.raises(ConfigError, match="not served: time_step_limit"):
        complete(folder)


def test_qwen_without_an_interval(tmp_path: Path) -> None:
    """As transformers writes it, which takes the interval out of config.json and puts layer types in."""
    config = {key: value for key, value in QWEN3_NEXT.items() if key != "full_attention_interval"}
    folder = write(tmp_path, config)
    with pytest.raises(ConfigError) as refused:
        complete(folder)
    assert "add --json-model-override-args '{\"full_attention_interval\": 4}'" in str(refused.value)
    complete(folder, "--json-model-override-args", '{"full_attention_interval": 4}')
    nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config}
    namespace = flags.parse_engine(["--model-path", str(folder)])
    with pytest.raises(ConfigError, match='add "full_attention_interval": 4 to text_config in config'):
        misread.check(namespace, Model(str(folder), nested))
    misread.check(namespace, Model(str(folder), {**nested, "text_config": QWEN3_NEXT}))


def test_qwen_with_attention_off_the_interval(tmp_path: Path) -> None:
    labels = ["full_attention", *["linear_attention"] * 3]
    with pytest.raises(ConfigError, match="not served: full_attention_interval 4"):
        complete(write(tmp_path, {**QWEN3_NEXT, "layer_types": labels}))
    complete(write(tmp_path, {**QWEN3_NEXT, "layer_types": None}))
