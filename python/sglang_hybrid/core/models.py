"""Models by the names users have for them: a preset, a hub name of one, a model folder or its config.json."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import PRESETS, ModelSpec, from_config

HUB_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
        "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": "qwen3-next-80b-a3b",
        "Qwen/Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
        "Qwen/Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
        "Qwen/Qwen3.5-27B": "qwen3.5-27b",
        "nvidia/Nemotron-H-8B-Base-8K": "nemotron-h-8b",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": "nemotron-3-nano-30b-a3b",
        "ai21labs/AI21-Jamba-1.5-Mini": "jamba-1.5-mini",
        "ai21labs/AI21-Jamba-Mini-1.5": "jamba-1.5-mini",
        "tiiuae/Falcon-H1-7B-Base": "falcon-h1-7b",
        "tiiuae/Falcon-H1-7B-Instruct": "falcon-h1-7b",
        "ibm-granite/granite-4.0-h-small": "granite-4.0-h-small",
        "moonshotai/Kimi-Linear-48B-A3B-Base": "kimi-linear-48b-a3b",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi-linear-48b-a3b",
        "Zyphra/Zamba2-7B": "zamba2-7b",
        "Zyphra/Zamba2-7B-Instruct": "zamba2-7b",
        "mistralai/Mamba-Codestral-7B-v0.1": "mamba-codestral-7b",
        "tiiuae/falcon-mamba-7b": "falcon-mamba-7b",
        "tiiuae/falcon-mamba-7b-instruct": "falcon-mamba-7b",
        "LiquidAI/LFM2-1.2B": "lfm2-1.2b",
        "LiquidAI/LFM2-8B-A1B": "lfm2-8b-a1b",
        "Zyphra/ZAYA1-8B": "zaya1-8b",
        "openbmb/MiniCPM-SALA": "minicpm-sala",
        "inclusionAI/Ring-mini-linear-2.0": "ring-mini-linear-2.0",
        "MiniMaxAI/MiniMax-Text-01": "minimax-text-01",
        "MiniMaxAI/MiniMax-Text-01-hf": "minimax-text-01",
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    }
)
"""Names of the model hub whose configuration a preset holds; letter case does not matter."""


def find_model(name: str) -> ModelSpec:
    """The spec of a preset, of a hub name, or of the folder or config.json at `name`.

    What is on this disk comes before a hub name. Raises ConfigError that suggests the nearest names.
    """
    if name in PRESETS:
        return PRESETS[name]
    if Path(name).exists():
        return from_config(name)
    known = {known.lower(): known for known in (*PRESETS, *HUB_NAMES)}
    exact = known.get(name.lower())
    if exact is not None:
        return PRESETS[HUB_NAMES.get(exact, exact)]
    near = [known[match] for match in difflib.get_close_matches(name.lower(), known, 3, 0.55)]
    if not near:  # an organisation hides how near the rest is
        last = name.lower().rpartition("/")[2]
        near = [known[match] for match in difflib.get_close_matches(last, known, 3, 0.55)]
    meant = f"did you mean {' or '.join(near)}?" if near else f"the presets are {', '.join(sorted(PRESETS))}"
    raise ConfigError(f"no such model folder, config.json or known model; {meant} Given: {name}")
