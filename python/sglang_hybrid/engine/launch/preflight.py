"""What can be known to fail before minutes of start-up: the model folder, its architecture, files, sizes."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.served import ARCHITECTURES, Where
from sglang_hybrid.core.spec import ModelSpec, from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import folder as files
from sglang_hybrid.engine.launch.flags import attention_groups
from sglang_hybrid.prefix.request_log import check_writable
from sglang_hybrid.prefix.seeds import read_prefixes

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MODELS = "sglang.srt.models"
_OWN_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_RECORDER = "0.5.21"
_LEAST_TOKENS = 128
"""A prompt, its answer and SGLang's own head room; below this not even the warm-up request fits."""


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


def check_files(config: HybridConfig, namespace: Any) -> None:
    """Raise ConfigError for files and folders of settings that cannot be written or read."""
    if config.backend == "stock":
        _check_unused(config, "--hybrid-backend stock")
    if namespace.disable_radix_cache:
        _check_unused(config, "--disable-radix-cache")
    if namespace.disaggregation_mode == "decode":
        _check_unused(config, "--disaggregation-mode decode, where no prompt is computed")
    if config.state_events == "published":
        _check_events(namespace)
    read_prefixes(config.seed_prefixes)
    if config.media_folder and not Path(config.media_folder).is_dir():
        raise ConfigError(
            f"no such folder for images, videos and sounds (--hybrid-media-folder): {config.media_folder}"
        )
    if config.request_log:
        schedulers = int(namespace.dp_size or 1) * int(namespace.pp_size or 1)
        if not namespace.enable_dp_attention:
            schedulers *= attention_groups(namespace)
        if schedulers > 1:
            raise ConfigError(
                "a request log holds the decisions of one scheduler; leave out --hybrid-request-log or --dp-size, "
                f"--pp-size and --attn-dp-size, which make: {schedulers}"
            )
        check_writable(Path(config.request_log).expanduser())


def check_model_is_ours(config: HybridConfig, model: Model) -> None:
    """Raise ConfigError for settings of our cache with a model that SGLang's own cache serves."""
    if model.config is not None and not model.is_recurrent:
        _check_unused(config, f"a model without known recurrent states, {model.architecture}")


def _check_events(namespace: Any) -> None:
    if not compat.at_least(_RECORDER):
        raise ConfigError(
            f"--hybrid-state-events needs SGLang {_RECORDER} or newer, which has one recorder of events for all of its "
            f"caches: {compat.engine_version()}"
        )
    if _publisher(getattr(namespace, "kv_events_config", None) or "{}") in ("", "null"):
        raise ConfigError(
            "states are told of on SGLang's channel of KV events, open it with --kv-events-config "
            '\'{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}\': --hybrid-state-events published'
        )


def _publisher(text: str) -> str:
    """Who publishes SGLang's events: "null", its default, is nobody."""
    try:
        return str(json.loads(text).get("publisher") or "")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"--kv-events-config must be a JSON object ({error}): {text}") from error


def _check_unused(config: HybridConfig, cause: str) -> None:
    told = "" if config.state_events == "none" else config.state_events
    for value, flag in (
        (config.request_log, "--hybrid-request-log"),
        (config.seed_prefixes, "--hybrid-seed-prefixes"),
        (told, "--hybrid-state-events"),
    ):
        if value:
            raise ConfigError(f"only our cache takes {flag}, and it is not active with {cause}; drop {flag}: {value}")


def check_sizes(namespace: Any, spec: ModelSpec | None, slots_per_request: int) -> None:
    """Raise ConfigError if the sizes given leave no room for one request."""
    tokens, states = namespace.max_total_tokens, namespace.max_mamba_cache_size
    if tokens is not None and tokens < _LEAST_TOKENS:
        raise ConfigError(
            f"--max-total-tokens leaves no room for one request, at least {_LEAST_TOKENS} are needed: {tokens}"
        )
    if spec is not None and spec.checkpoint_bytes and states is not None and states < slots_per_request:
        raise ConfigError(
            f"--max-mamba-cache-size leaves no room for one request, which takes {slots_per_request} state slots "
            f"under this strategy: {states}"
        )
