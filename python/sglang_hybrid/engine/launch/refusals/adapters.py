"""What is known of adapters (LoRA) before they are loaded: which layers they change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch.flags import attention_groups
from sglang_hybrid.engine.launch.models import Model

_STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_OF_EXPERTS = {"gate_up_proj", "down_proj"}
"""SGLang adapts experts where adapters change both."""

_ALL = {"all", "all-linear"}

_BLOCK = 32
"""SGLang widens feed-forward layers on a CPU to a multiple of this per rank. Adapters it does not."""


def check(namespace: Any, model: Model) -> None:
    """On a CPU: raise ConfigError for adapters that end the scheduler with their first request.

    Those of experts run in Triton; those of feed-forward layers that were widened have another shape than these.
    """
    _check_widened(namespace, model)
    if model.spec is None or "moe" not in model.spec.layer_counts:
        return
    for flag, targets in _targets(namespace):
        if targets >= _OF_EXPERTS or targets & _ALL:
            raise ConfigError(
                "adapters of experts run on a GPU only; give adapters of attention (o_proj) or of one of gate_up_proj "
                f"and down_proj: {flag}"
            )


def check_groups(namespace: Any, on_cpu: bool) -> None:
    """Raise ConfigError for adapters with data-parallel attention where SGLang has none: it ends in a traceback."""
    groups = attention_groups(namespace)
    if groups < 2 or not (namespace.enable_lora or namespace.lora_paths) or not compat.at_least("0.5.21"):
        return
    if on_cpu or namespace.lora_backend != "triton":
        remedy = "use --dp-size or --tp-size alone" if on_cpu else "add --lora-backend triton"
        raise ConfigError(
            "SGLang has adapters (LoRA) with data-parallel attention in Triton only, on a GPU; "
            f"{remedy}: {groups} groups, --lora-backend {namespace.lora_backend}"
        )


def _check_widened(namespace: Any, model: Model) -> None:
    ranks = namespace.tp_size
    config = (model.config or {}).get("text_config") or model.config or {}
    sizes = {name: config.get(name) or 0 for name in ("intermediate_size", "shared_expert_intermediate_size")}
    wide = [f"{name} {size}" for name, size in sizes.items() if size % (_BLOCK * ranks)]
    if not wide:
        return
    for flag, targets in _targets(namespace):
        if targets & (_OF_EXPERTS | _ALL):
            raise ConfigError(
                f"on a CPU adapters of feed-forward layers need a multiple of {_BLOCK * ranks} on {ranks} ranks; serve "
                f"with another --tp-size, or adapt attention (o_proj) alone; {wide[0]}: {flag}"
            )


def _targets(namespace: Any) -> list[tuple[str, set[str]]]:
    """The layers that are adapted, with the flags that say so: the user's list, or that of all adapters together."""
    asked = getattr(namespace, "lora_target_modules", None)
    if asked:
        return [(f"--lora-target-modules {' '.join(sorted(asked))}", _layers(asked))]
    paths = [_path(given) for given in getattr(namespace, "lora_paths", None) or ()]
    together = set().union(*(_read(Path(path).expanduser()) for path in paths))
    return [(f"--lora-paths {' '.join(paths)}", _layers(together))]


def _layers(modules: Iterable[str]) -> set[str]:
    """SGLang's layers that hold `modules`."""
    names = {name.split(".")[-1] for name in modules}
    return {_STACKED.get(name, name) for name in names}


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
