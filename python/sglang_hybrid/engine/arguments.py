"""The arguments SGLang starts with: the user's, and our defaults where the user said nothing."""

from __future__ import annotations

import os
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import cpu_profile, flags
from sglang_hybrid.engine.preflight import Model

_STOCK_ONLY = {
    "enable_int8_mamba_checkpoint": "--enable-int8-mamba-checkpoint",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
    "enable_kv_cache_sharding": "--enable-kv-cache-sharding",
    "enable_lmcache": "--enable-lmcache",
}
"""SGLang serves these only with its own radix cache."""


def complete(namespace: Any, rest: list[str], config: HybridConfig, model: Model) -> tuple[list[str], Any]:
    """Return the final arguments and their parsed form; raises ConfigError for contradictions.

    `rest` is what the user gave SGLang; a flag in it always wins over a default of ours. Sets the environment
    variables a data type implies.
    """
    extra: dict[str, Any] = {"enable_cache_report": True}
    if config.backend == "hybrid":
        extra["radix_cache_backend"] = _backend(namespace)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        extra |= cpu_profile.flags(namespace, config, model.spec, _stored_dtype(model))
    final = list(rest)
    for name, value in extra.items():
        flag = "--" + name.replace("_", "-")
        if not any(argument == flag or argument.startswith(flag + "=") for argument in rest):
            final += [flag] if value is True else [flag, str(value)]
    namespace = flags.parse_engine(final)
    _match_state_dtypes(namespace, model)
    return final, namespace


def slots_per_request(namespace: Any) -> int:
    """State slots SGLang reserves per running request (its ratio, without the optional decode-lock saving)."""
    if namespace.disable_radix_cache:
        return 1
    if namespace.mamba_radix_cache_strategy not in ("extra_buffer", "extra_buffer_lazy"):
        return 3
    lazy = namespace.mamba_radix_cache_strategy == "extra_buffer_lazy"
    return 4 if namespace.disable_overlap_schedule or lazy else 5


def _backend(namespace: Any) -> str:
    asked = [flag for name, flag in _STOCK_ONLY.items() if getattr(namespace, name, False)]
    if asked:
        raise ConfigError(f"SGLang allows this only with its own cache; add --hybrid-backend stock: {asked[0]}")
    if namespace.radix_cache_backend not in (None, "hybrid"):
        raise ConfigError(
            "another radix cache backend takes the place of ours; add --hybrid-backend stock: "
            f"--radix-cache-backend {namespace.radix_cache_backend}"
        )
    return "hybrid"


def _stored_dtype(model: Model) -> str | None:
    config = model.config or {}
    nested = config.get("text_config") or {}
    return next((c[key] for c in (config, nested) for key in ("dtype", "torch_dtype") if c.get(key)), None)


def _match_state_dtypes(namespace: Any, model: Model) -> None:
    """Convolution windows follow the activations' type: SGLang leaves them bfloat16, and with float32 activations
    the extra_buffer strategy then dies on the first prompt (0.5.21)."""
    dtype = {"half": "float16", "float": "float32"}.get(namespace.dtype, namespace.dtype)
    if dtype == "auto":
        stored = _stored_dtype(model)
        dtype = {"float32": "float16"}.get(stored or "", stored)  # SGLang serves float32 weights in float16
    if dtype in ("float32", "float16", "bfloat16"):
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", dtype)
