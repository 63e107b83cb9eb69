"""The model before it is loaded: its folder and configuration, and whether it can be served here."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.served import ARCHITECTURES, Where
from sglang_hybrid.core.spec import ModelSpec, from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import folder as files

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MODELS = "sglang.srt.models"
_OWN_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model before the engine loads it; `config` is None for a hub name not on this disk.

    `reason` says why a configuration has no costs.
    """

    path: str
    config: dict[str, Any] | None = None
    spec: ModelSpec | None = None
    note: str | None = None
    reason: str = ""

    @property
    def architecture(self) -> str:
        """SGLang's class for it; empty where the configuration is not known."""
        return str(self.config["architectures"][0]) if self.config else ""

    @property
    def is_recurrent(self) -> bool:
        """Whether it is known to have recurrent states, so that the cache is ours."""
        return self.spec is not None and self.spec.is_recurrent


def inspect_model(namespace: Any) -> Model:
    """Look at `namespace.model_path`; raises ConfigError for a folder or an architecture that cannot be served."""
    path = namespace.model_path
    folder = Path(path).expanduser()
    if not folder.exists():
        files.refuse_typo(path)
        if _HUB_NAME.fullmatch(path) and not path.startswith("."):
            return Model(path)
        raise ConfigError(f"no such model folder; give a folder with config.json or a hub name ORG/MODEL: {path}")
    if not folder.is_dir():
        return Model(path)  # a single file, for example GGUF: SGLang's loader knows
    config = read_config(folder) | _overrides(namespace)
    if namespace.load_format != "dummy":
        files.check_weights(folder)
    _check_architecture(config)
    try:
        spec = from_config(config)
    except ConfigError as error:
        note = f"costs of this model are unknown, sizes and cache are SGLang's own: {error}"
        return Model(path, config, None, note, str(error))
    note = None
    if spec.checkpoint_bytes == 0:
        note = "the model has no recurrent layers: it is served, with plain attention caching"
    return Model(path, config, spec, note)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; raises ConfigError if it is not there, damaged or names no architecture."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"the model folder has no config.json: {folder}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"config.json of the model is not valid JSON ({error}): {file}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigError(f"config.json names no architecture (key 'architectures'): {file}")
    return config


def _overrides(namespace: Any) -> dict[str, Any]:
    """Keys that take the place of those in config.json, as SGLang applies them."""
    text = getattr(namespace, "json_model_override_args", None) or "{}"
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--json-model-override-args must be a JSON object ({error}): {text}") from error
    if not isinstance(overrides, dict):
        raise ConfigError(f"--json-model-override-args must be a JSON object: {text}")
    return overrides


def _check_architecture(config: dict[str, Any]) -> None:
    """Read the class names in SGLang's model files instead of importing two hundred modules."""
    name = config["architectures"][0]
    if "auto_map" in config and name not in ARCHITECTURES:
        return  # code that travels with the model, which would run without a cache of the states that we know of
    if os.environ.get(_OWN_MODELS):
        return  # models of the user's package, which SGLang looks at first
    package, *below = _MODELS.split(".")
    spec = PathFinder.find_spec(package)  # nothing is imported, by our own finder neither (`cpu_environment`)
    if spec is None:
        return  # a missing SGLang is said later, with its remedy
    roots = spec.submodule_search_locations or ()
    served: set[str] = set()
    for file in (file for root in roots for file in Path(root, *below).rglob("*.py")):
        served.update(re.findall(r"^class (\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE))
    if name in served:
        return
    if name in ARCHITECTURES:
        raise ConfigError(f"this SGLang serves no such architecture; `sglang-hybrid spec` and simulate know it: {name}")
    close = difflib.get_close_matches(name, [n for n in served if n.endswith(("CausalLM", "Generation"))], n=3)
    near = f"; the nearest it knows: {', '.join(close)}" if close else ""
    raise ConfigError(f"this SGLang serves no such architecture{near}: {name}")


def check_computable(model: Model) -> None:
    """On a CPU: raise ConfigError for a hybrid model with layers that only SGLang's GPU kernels compute.

    Such a server would start, say that it is ready and die on its first request.
    """
    name = model.architecture
    row = ARCHITECTURES.get(name)
    if row is None:
        return
    if row.where is not Where.CPU:
        here = ", ".join(known for known, served in ARCHITECTURES.items() if served.where is Where.CPU)
        raise ConfigError(
            f"this model is served on a GPU only, and none is here or --device says so; hybrid models served on a CPU "
            f"are {here}: {name}"
        )
    if row.cpu_since and not compat.complete():
        raise ConfigError(
            f"on a CPU this model is served with SGLang {row.cpu_since} or newer, this is {compat.engine_version()}: "
            f"{name}"
        )
    if model.spec is not None and row.not_on_cpu in model.spec.layer_counts:
        raise ConfigError(
            f"with {row.not_on_cpu} layers this model is served on a GPU only, and none is here or --device says so: "
            f"{name}"
        )
