"""Settings that end SGLang's processes, or its first request, whatever the model."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import environment
from sglang_hybrid.engine.launch.flags import spelled

_COUNTS = ("page_size", "mamba_track_interval", "prefill_max_requests", "max_running_requests", "context_length")
"""Zero ends the start or the first request, or lets every request wait for ever."""

_LEAST_CONTEXT = 8
"""SGLang takes seven tokens of it and a prompt has one. With one in all the start ends on an assertion."""

_TRACING = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.exporter.otlp.proto.http")
"""What SGLang imports for traces. Other packages bring `opentelemetry` itself."""

_DELAYER = "SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE"
"""The variable that stands for `--enable-prefill-delayer`."""


def check(namespace: Any, on_cpu: bool) -> None:
    """Raise ConfigError for such settings; `namespace` are SGLang's final ones."""
    _check_counts(namespace)
    _check_detokenizers(namespace)
    _check_actors(namespace)
    _check_keys(namespace)
    _check_delayer(namespace, on_cpu)
    _check_tracing(namespace)
    _check_grpc(namespace)


def _check_counts(namespace: Any) -> None:
    for name in _COUNTS:
        count = getattr(namespace, name, None)
        if count is not None and count < 1:
            raise ConfigError(f"{spelled(name)} must be 1 or more: {count}")
    context = namespace.context_length
    if context is not None and context < _LEAST_CONTEXT:
        raise ConfigError(
            f"no prompt is short enough for this, give --context-length {_LEAST_CONTEXT} or more: {context}"
        )


def _check_detokenizers(namespace: Any) -> None:
    """The detokenizers' router ends on the first request that no HTTP worker has signed (0.5.17 to 0.5.23)."""
    count = getattr(namespace, "detokenizer_worker_num", 1) or 1
    if count > 1 and (namespace.tokenizer_worker_num or 1) < 2:
        raise ConfigError(
            "with several detokenizers and one HTTP process SGLang ends at the first request; add "
            f"--tokenizer-worker-num 2 or drop: --detokenizer-worker-num {count}"
        )


def _check_actors(namespace: Any) -> None:
    if getattr(namespace, "use_ray", False):
        raise ConfigError(
            "SGLang's Ray actors load no plugins, so this package would not be in them; start a process per rank, or "
            "sglang-hybrid cluster for replicas, and drop: --use-ray"
        )


def _check_keys(namespace: Any) -> None:
    """Of several HTTP processes none asks for a key: with one for clients each ends, after the model was loaded; one
    for administrators guards nothing (0.5.21 and 0.5.23)."""
    count = namespace.tokenizer_worker_num or 1
    for name in ("api_key", "admin_api_key"):
        if count > 1 and getattr(namespace, name, None):
            raise ConfigError(
                "SGLang asks for keys with one HTTP process only; let a proxy ask for them and drop this, or drop "
                f"--tokenizer-worker-num {count}: {spelled(name)}"
            )


def _check_delayer(namespace: Any, on_cpu: bool) -> None:
    """The scheduler would end on an assertion."""
    asked = ["--enable-prefill-delayer"] if getattr(namespace, "enable_prefill_delayer", False) else []
    asked += [_DELAYER] if environment.is_on(_DELAYER) else []
    if asked and namespace.disable_overlap_schedule:
        remedy = "add --hybrid-cpu-event-loop overlap" if on_cpu else "drop --disable-overlap-schedule"
        raise ConfigError(f"prefills are delayed by the overlap schedule only; {remedy}: {asked[0]}")


def _check_tracing(namespace: Any) -> None:
    """The detokenizer would end at the start, and the scheduler with it."""
    if getattr(namespace, "enable_trace", False) and not all(map(_is_installed, _TRACING)):
        raise ConfigError(
            "traces need packages that are not installed; run pip install opentelemetry-api opentelemetry-sdk "
            "opentelemetry-exporter-otlp opentelemetry-exporter-otlp-proto-grpc or drop: --enable-trace"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # nor is what it is in
        return False


def _check_grpc(namespace: Any) -> None:
    """What comes over gRPC is checked by nobody: an empty `PauseGeneration` would end the server."""
    port = getattr(namespace, "grpc_port", None) or os.environ.get("SGLANG_GRPC_PORT")
    if port:
        raise ConfigError(
            "requests of SGLang's gRPC server are not checked, and one of them would end this server; unset "
            f"SGLANG_GRPC_PORT or drop: --grpc-port {port}"
        )
