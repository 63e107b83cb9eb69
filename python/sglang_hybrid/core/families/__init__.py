"""Which layers a Hugging Face configuration describes, one function per model family.

Field names and defaults follow the configuration classes of transformers and SGLang; the resulting pool sizes are
compared with SGLang's own in tests/conformance/test_spec_against_sglang.py, the weights with transformers' modules.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sglang_hybrid.core.architecture import Architecture
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.families.convolution import lfm2, lfm2_moe, zaya
from sglang_hybrid.core.families.delta import gigachat, jet_nemotron, kimi_linear
from sglang_hybrid.core.families.lightning import bailing_hybrid, bailing_linear, minicpm_sala, minimax
from sglang_hybrid.core.families.mamba import (
    bamba,
    falcon_h1,
    granite_hybrid,
    jamba,
    nemotron_h,
    nemotron_h_multimodal,
    nemotron_h_puzzle,
    pure_mamba1,
    pure_mamba2,
    zamba2,
)
from sglang_hybrid.core.families.qwen import qwen_hybrid, transformer
from sglang_hybrid.core.families.sparse import glm5_next, qwen4_exp
from sglang_hybrid.core.reading import ConfigReader

_TEXT_PARTS = ("text_config", "llm_config")


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a configuration; the text part if it is nested. Raises ConfigError if unsupported."""
    named = ConfigReader(config, "model")
    classes = named.items("architectures", of=str)
    model_type = named.text("model_type", default="")
    shown = classes[0] if classes else model_type
    reader = ConfigReader(config, shown)
    if model_type in UNPRICED:
        raise ConfigError(f"no costs for {shown}, {UNPRICED[model_type]}: {model_type!r}")
    family = FAMILIES.get(model_type)
    if family is None:
        near = difflib.get_close_matches(model_type, FAMILIES, 3)
        supported = f"near model types with costs are {', '.join(near)}" if near else _families()
        raise ConfigError(
            f"no costs are known for architecture {shown or 'without model_type'}; {supported}: {model_type!r}"
        )
    text = next((reader.nested(key) for key in _TEXT_PARTS if reader.value(key) is not None), reader)
    context = text.count("max_position_embeddings", "model_max_length", default=0)  # Kimi-Linear has the second alone
    return replace(family(text), context_tokens=context)


def _families() -> str:
    return f"model types with costs are {', '.join(sorted(FAMILIES))}"


FAMILIES: Mapping[str, Callable[[ConfigReader], Architecture]] = MappingProxyType(
    {
        "NemotronH_Nano_Omni_Reasoning_V3": nemotron_h_multimodal,
        "NemotronH_Nano_VL_V2": nemotron_h_multimodal,
        "bailing_hybrid": bailing_hybrid,
        "bailing_moe_linear": bailing_linear,
        "bailing_moe_v3_vl": bailing_hybrid,
        "bamba": bamba,
        "falcon_h1": falcon_h1,
        "falcon_mamba": pure_mamba1,
        "gigachat3_5": gigachat,
        "glm5_next": glm5_next,
        "glm5_next_text": glm5_next,
        "granitemoehybrid": granite_hybrid,
        "intern_s2_preview": qwen_hybrid,
        "interns2_mobius": qwen_hybrid,
        "jamba": jamba,
        "jet_nemotron": jet_nemotron,
        "jet_vlm": jet_nemotron,
        "kimi_k3": kimi_linear,
        "kimi_linear": kimi_linear,
        "lfm2": lfm2,
        "lfm2_moe": lfm2_moe,
        "lfm2_vl": lfm2,
        "llama": transformer,
        "mamba": pure_mamba1,
        "mamba2": pure_mamba2,
        "minicpm_sala": minicpm_sala,
        "minicpmv4_6": qwen_hybrid,
        "minicpmv4_7": qwen_hybrid,
        "minimax": minimax,
        "minimax_m1": minimax,
        "minimax_text_01": minimax,
        "mistral": transformer,
        "mixtral": transformer,
        "nemotron_h": nemotron_h,
        "nemotron_h_omni": nemotron_h_multimodal,
        "nemotron_h_puzzle": nemotron_h_puzzle,
        "qwen2": transformer,
        "qwen3": transformer,
        "qwen3_5": qwen_hybrid,
        "qwen3_5_moe": qwen_hybrid,
        "qwen3_5_moe_text": qwen_hybrid,
        "qwen3_5_text": qwen_hybrid,
        "qwen3_moe": transformer,
        "qwen3_next": qwen_hybrid,
        "qwen4_exp": qwen4_exp,
        "qwen4_exp_text": qwen4_exp,
        "zamba2": zamba2,
        "zaya": zaya,
    }
)

UNPRICED: Mapping[str, str] = MappingProxyType(
    {
        "inkling_mm_model": "whose sliding windows make KV of two sizes",
        "inkling_model": "whose sliding windows make KV of two sizes",
    }
)
"""Hybrid models that SGLang serves and that have no costs here, with the reason."""
