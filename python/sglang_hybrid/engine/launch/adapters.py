"""What is known of adapters (LoRA) before they are loaded: which layers they change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch.preflight import Model

_STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_OF_EXPERTS = {"gate_up_proj", "down_proj"}
"""SGLang adapts experts where adapters change both."""

_ALL = {"all", "all-linear"}


def check(namespace: Any, model: Model) -> None:
    """On a CPU: raise ConfigError for adapters of experts, which run in Triton and end the scheduler."""
    if model.spec is None or "moe" not in model.spec.layer_counts:
        return
    for flag, targets in _targets(namespace):
        names = {_STACKED.get(name.split(".")[-1], name.split(".")[-1]) for name in targets}
        if names >= _OF_EXPERTS or names & _ALL:
            raise ConfigError(
                "adapters of experts run on a GPU only; give adapters of attention (o_proj) or of one of gate_up_proj "
                f"and down_proj: {flag}"
            )


def _targets(namespace: Any) -> list[tuple[str, set[str]]]:
    """The modules that are adapted, with the flags that say so: the user's list, or that of all adapters together."""
    asked = getattr(namespace, "lora_target_modules", None)
    if asked:
        return [(f"--lora-target-modules {' '.join(sorted(asked))}", set(asked))]
    paths = [_path(given) for given in getattr(namespace, "lora_paths", None) or ()]
    together = set().union(*(_read(Path(path).expanduser()) for path in paths))
    return [(f"--lora-paths {' '.join(paths)}", together)]


def _path(given: Any) -> str:
    """The folder in PATH, NAME=PATH or {"lora_path": PATH}."""
    return str(given["lora_path"]) if isinstance(given, dict) else str(given).split("=", 1)[-1]


def _read(folder: Path) -> set[str]:
    """`target_modules` of an adapter; nothing where SGLang would not find it here either."""
    try:
        targets = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {targets} if isinstance(targets, str) else {str(target) for target in targets}
