"""The one configuration object of the package: frozen, validated, the same in every process of a server."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from sglang_hybrid.core import addresses
from sglang_hybrid.core.errors import ConfigError

ENVIRONMENT_KEY = "SGLANG_HYBRID_CONFIG"
"""Child processes of a server do not parse flags: the launcher passes them its configuration under this name."""

REPLACED = ("admission", "eviction", "marconi_alpha")
"""Settings of earlier releases, which `policy` names together."""

_SWITCH = ("off", "on")
_launches = False


def _option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Settings of sglang-hybrid; every field is also a flag `--hybrid-<field-with-dashes>`."""

    backend: str = _option(
        "hybrid",
        "radix cache backend: 'hybrid' is ours, 'stock' leaves SGLang's own cache in place",
        ("hybrid", "stock"),
    )
    policy: str = _option("forecast", "what is cached and what is evicted first")
    request_log: str = _option(
        "", "file to record every decision of the cache in, for `sglang-hybrid replay`; tokens are hashed"
    )
    request_log_mb: float = _option(256.0, "where the request log ends, in MB")
    request_log_tokens: str = _option(
        "hashed", "'plain' writes the tokens of users into the request log", ("hashed", "plain")
    )
    seed_prefixes: str = _option(
        "", 'JSONL file of hot prefixes, one {"input_ids": [...]} a line: checkpointed the first time they are computed'
    )
    state_events: str = _option(
        "none",
        "'published' tells routers where states come and go, on SGLang's channel of KV events (--kv-events-config)",
        ("none", "published"),
    )
    dp_routing: str = _option(
        "prefix",
        "data-parallel replicas, or groups of attention: 'prefix' sends a request to the one that was sent most of its "
        "prompt before, unless that has much more to do; 'round_robin' is SGLang's default. Another "
        "--load-balance-method is left as it is",
        ("prefix", "round_robin"),
    )
    log_interval_s: float = _option(60.0, "least seconds between two summaries of the cache in the log; 0 is never")
    memory: str = _option(
        "static",
        "KV and recurrent states: 'static' pools of fixed sizes, or 'elastic' ones that share one budget of memory, "
        "mapped when it is needed and given back when the server is idle",
        ("static", "elastic"),
    )
    memory_idle_s: float = _option(2.0, "elastic memory: seconds after which unused memory of an idle server goes back")
    segments: str = _option(
        "off",
        "'on' reuses what requests mark as segments (documents, tools) at any position, behind any text; answers over "
        "them are approximations",
        _SWITCH,
    )
    segment_memory_gb: float = _option(
        0.0,
        "segments: memory for their states and KV, in GB, on each rank; with elastic memory the most they may take of "
        "the budget. 0 is 1 GB, and with elastic memory no limit but the budget",
    )
    segment_dtype: str = _option("bfloat16", "segments: how their states are stored", ("bfloat16", "int8", "float32"))
    segment_mode: str = _option(
        "transition",
        "segments: 'transition' composes states by what each segment does to those before it; for study, 'addition' "
        "adds end states up, 'full' computes every segment",
        ("transition", "addition", "full"),
    )
    segment_separator: str = _option(
        "", "segments: text between the segments of a prompt of /v1/completions and /generate; empty is none"
    )
    segment_roles: str = _option(
        "",
        "segments: roles or names of chat messages that are segments as a whole, with commas between them, for example "
        "'tool'",
    )
    segment_peers: str = _option(
        "",
        "segments: addresses of servers with the same model that compute cold segments for each other, with commas "
        "between them, for example http://10.0.0.1:30000,http://10.0.0.2:30000; this server may be among them",
    )
    seam_tokens: int = _option(8, "segments: tokens at each end of a segment that are computed with every use")
    max_sequences: int = _option(8192, "most sequences of one HTTP request: its prompts times n")
    max_body_mb: float = _option(64.0, "largest body of an HTTP request, in MB; images and videos come in bodies")
    max_megapixels: float = _option(
        512.0, "most pixels of all images in the body of one request, in millions: a small file may hold a huge image"
    )
    media_folder: str = _option(
        "", "the folder below which requests may name images, videos and sounds by their path; empty is none"
    )
    cpu_memory_gb: float = _option(
        1.0, "on a CPU: bytes for KV and recurrent states together, in GB, where no explicit SGLang size is given"
    )
    cpu_threads: int = _option(0, "on a CPU: threads for tensor operations; 0 means half of the cores, at least one")

    cpu_event_loop: str = _option(
        "normal",
        "on a CPU: the event loop of SGLang's scheduler; 'overlap' is the default of GPUs, and saves nothing on a CPU",
        ("normal", "overlap"),
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            choices = option.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(f"{option.name} must be one of {', '.join(choices)}: {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{option.name} must be a finite number: {value}")
        if not self.request_log_mb > 0:
            raise ConfigError(f"request_log_mb must be positive, for example 256: {self.request_log_mb}")
        if not self.log_interval_s >= 0:
            raise ConfigError(f"log_interval_s must be 0 (never) or more: {self.log_interval_s}")
        if not self.memory_idle_s >= 0:
            raise ConfigError(f"memory_idle_s must be 0 (at once) or more: {self.memory_idle_s}")
        if not self.segment_memory_gb >= 0:
            raise ConfigError(f"segment_memory_gb must be 0 (the default) or more: {self.segment_memory_gb}")
        if not 0 <= self.seam_tokens <= 1024:
            raise ConfigError(f"seam_tokens must be between 0 and 1024: {self.seam_tokens}")
        for url in self.peers:
            if (parts := addresses.server(url)) is None or parts.port == 0:
                raise ConfigError(f"segment_peers are addresses such as http://10.0.0.1:30000: {url}")
        if self.max_sequences < 1:
            raise ConfigError(f"max_sequences must be 1 or more: {self.max_sequences}")
        if not self.max_body_mb > 0:
            raise ConfigError(f"max_body_mb must be positive, for example 64: {self.max_body_mb}")
        if not self.max_megapixels > 0:
            raise ConfigError(f"max_megapixels must be positive, for example 512: {self.max_megapixels}")
        if not self.cpu_memory_gb > 0:
            raise ConfigError(f"cpu_memory_gb must be positive, for example 1.0: {self.cpu_memory_gb}")
        if self.cpu_threads < 0:
            raise ConfigError(f"cpu_threads must be 0 (automatic) or more: {self.cpu_threads}")

    @property
    def peers(self) -> list[str]:
        """The addresses of servers that compute segments for each other."""
        return [url.strip().rstrip("/") for url in self.segment_peers.split(",") if url.strip()]

    @property
    def segment_bytes(self) -> int:
        """Bytes of a buffer for segments, where they have one of their own."""
        return int((self.segment_memory_gb or 1.0) * 1e9)

    @property
    def cpu_memory_bytes(self) -> int:
        """The CPU cache budget in bytes (1 GB = 1e9 bytes)."""
        return int(self.cpu_memory_gb * 1e9)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> HybridConfig:
        """Build from plain values; an unknown key or a wrong type raises ConfigError with the nearest name."""
        known = {option.name: option for option in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            if key in REPLACED:
                raise ConfigError(f"the setting is called policy now, one word for both (--hybrid-policy): {key!r}")
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f", did you mean {close[0]!r}" if close else f" (known: {', '.join(known)})"
                raise ConfigError(f"unknown key in the hybrid configuration{hint}: {key!r}")
            if isinstance(value, bool) and known[key].metadata["choices"] == _SWITCH:
                value = _SWITCH[value]  # YAML 1.1 takes a plain on and off for truth values
            values[key] = _coerce(key, value, type(known[key].default))
        return cls(**values)

    def leave(self) -> None:
        """In a launcher of ours: put this into the environment, for this process and those that it starts."""
        global _launches
        _launches = True
        os.environ[ENVIRONMENT_KEY] = self.to_json()

    @staticmethod
    def in_environment() -> bool:
        """Whether this process is a launcher of ours or was started by one.

        Another one may have the variable all the same: whatever a program with an engine of ours runs inherits it.
        """
        return ENVIRONMENT_KEY in os.environ and (_launches or parent_process() is not None)

    @classmethod
    def from_environment(cls) -> HybridConfig:
        """What the launcher passed to its children; the defaults without a launcher of ours."""
        return cls.from_json(os.environ.get(ENVIRONMENT_KEY, "{}"))

    @classmethod
    def from_json(cls, text: str) -> HybridConfig:
        """Inverse of `to_json`."""
        return cls.from_mapping(json.loads(text))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def _coerce(key: str, value: Any, kind: type) -> Any:
    """Accept exactly `kind`, and a whole number where a real one is asked for; a bool is never a number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{key} must be of type {kind.__name__}: {value!r}")
    return value


def read_mapping(text_or_path: str) -> dict[str, Any]:
    """Read a JSON or YAML mapping given inline (it starts with '{') or as a path to a .json, .yaml or .yml file.

    Raises ConfigError for a missing file, malformed text or anything that is not a mapping.
    """
    source, origin = text_or_path, "the inline configuration"
    if not text_or_path.lstrip().startswith("{"):
        path = Path(text_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"no such configuration file; give a path or an inline JSON object: {text_or_path}")
        source, origin = path.read_text(encoding="utf-8"), str(path)
    parsed = _parse(source, origin)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{origin} must hold a mapping of option names to values: {type(parsed).__name__}")
    return parsed


def _parse(source: str, origin: str) -> Any:
    import yaml  # here, so that importing core costs nothing beyond the standard library

    with contextlib.suppress(ValueError):
        return json.loads(source)  # by itself: YAML 1.1 takes JSON's 1e9 for text
    try:
        return yaml.safe_load(source)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is neither valid JSON nor valid YAML: {' '.join(str(error).split())}") from error
