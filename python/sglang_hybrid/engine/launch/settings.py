"""Settings that can be known to fail before minutes of start-up: files, SGLang's channel of events, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch.flags import attention_groups
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.prefix.request_log import check_writable
from sglang_hybrid.prefix.seeds import read_prefixes

_RECORDER = "0.5.21"
_LEAST_TOKENS = 128
"""A prompt, its answer and SGLang's own head room; below this not even the warm-up request fits."""


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
