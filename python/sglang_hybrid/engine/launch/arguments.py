"""The arguments SGLang starts with: the user's, and our defaults where the user said nothing."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import free_port
from sglang_hybrid.engine.hicache import checks
from sglang_hybrid.engine.launch import (
    cpu_profile,
    disaggregation,
    environment,
    flags,
    graphs,
    platform,
    refusals,
    slots,
    unsettled,
)
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.engine.pools import refusals as elastic
from sglang_hybrid.engine.segments import refusals as segments
from sglang_hybrid.engine.speculation import checks as speculation
from sglang_hybrid.engine.speculation import drafts

_STOCK_ONLY = (
    "enable_int8_mamba_checkpoint",
    "enable_unified_cache_external_linker",
    "enable_kv_cache_sharding",
    "enable_lmcache",
    "enable_flexkv",
)
"""SGLang serves these only with its own radix cache."""


def complete(namespace: Any, rest: list[str], config: HybridConfig, model: Model) -> tuple[list[str], Any]:
    """Return the final arguments and their parsed form; raises ConfigError for contradictions.

    `rest` is what the user gave SGLang; a flag in it always wins over a default of ours. Sets the environment
    variables that a data type and the cache imply.
    """
    extra: dict[str, Any] = {"enable_cache_report": True}
    if namespace.nccl_port is None and namespace.dp_size == namespace.nnodes == 1:
        # SGLang takes one that the kernel hands out, and binds it many seconds later: a connection can have it by then.
        extra["nccl_port"] = free_port()
    on_cpu = platform.on_cpu()
    if namespace.disaggregation_mode != "null" and on_cpu:
        extra["disaggregation_transfer_backend"] = disaggregation.backend(on_cpu=True)
    if config.backend == "hybrid":
        extra["radix_cache_backend"] = _backend(namespace)
    environment.default(slots.environment(config))
    extra |= drafts.defaults(namespace)
    extra |= elastic.defaults(namespace, config, on_cpu)
    extra |= graphs.defaults(namespace, model, on_cpu)
    extra |= unsettled.defaults(namespace, model, on_cpu)
    dtype = _activation_dtype(namespace, model, on_cpu)
    if on_cpu:
        _check_sized(namespace, config, model)
        extra |= cpu_profile.flags(namespace, config, model.spec, dtype or "float32", model.architecture)
    final, given = list(rest), flags.given(rest)
    for name, value in extra.items():
        if name not in given:
            final += [flags.spelled(name)] if value is True else [flags.spelled(name), str(value)]
    if dtype is not None:
        # Convolution windows follow the activations. SGLang leaves them bfloat16, and with float32 activations the
        # extra_buffer strategy then dies on the first prompt (0.5.21).
        environment.default({"SGLANG_MAMBA_CONV_DTYPE": dtype})
    parsed = flags.parse_engine(final)
    refusals.check(parsed, namespace, config, model, on_cpu)
    graphs.check(parsed, model, on_cpu)
    speculation.check(parsed, model.spec)
    drafts.check(parsed, model, on_cpu)
    elastic.check(parsed, rest, config, model, on_cpu)
    segments.check(parsed, config, model.spec)
    checks.check(parsed, model, on_cpu)
    return final, parsed


def unused_memory(namespace: Any, config: HybridConfig, model: Model) -> str | None:
    """What to say if the user gave a memory budget that SGLang's final settings in `namespace` use a part of."""
    asked = config.cpu_memory_gb != HybridConfig().cpu_memory_gb
    if namespace.device != "cpu" or not asked or model.spec is None or config.memory == "elastic":
        return None
    spec = model.spec.with_dtypes(kv_dtype=namespace.dtype, conv_dtype=namespace.dtype)
    tokens, states = namespace.max_total_tokens, namespace.max_mamba_cache_size or 0
    used = tokens * spec.kv_bytes_per_token + states * spec.checkpoint_bytes
    if used > 0.9 * config.cpu_memory_bytes:
        return None
    return (
        f"{tokens:,} tokens and {states:,} states take {used / 1e9:.2g} of the {config.cpu_memory_gb:g} GB of "
        "--hybrid-cpu-memory-gb; for more, give --max-total-tokens and --max-mamba-cache-size"
    )


def _check_sized(namespace: Any, config: HybridConfig, model: Model) -> None:
    """Raise ConfigError where the pools would be SGLang's to size, by all of the machine's memory."""
    if model.spec is not None or config.memory == "elastic":
        return
    sizes = {
        "--max-total-tokens": namespace.max_total_tokens,
        "--max-mamba-cache-size": namespace.max_mamba_cache_size,
    }
    if None in sizes.values():
        what = model.architecture or model.path
        why = f" ({model.reason})" if model.reason else ""
        raise ConfigError(
            f"the costs of this model are not known before it is loaded{why}, so --hybrid-cpu-memory-gb cannot size "
            f"its pools; {'' if model.config else 'download it and give its folder, or '}"
            f"give {' and '.join(flag for flag, size in sizes.items() if size is None)}: {what}"
        )


def _backend(namespace: Any) -> str:
    asked = [flags.spelled(name) for name in _STOCK_ONLY if getattr(namespace, name, False)]
    if asked:
        raise ConfigError(f"SGLang allows this only with its own cache; add --hybrid-backend stock: {asked[0]}")
    if namespace.radix_cache_backend not in (None, "hybrid"):
        raise ConfigError(
            "another radix cache backend takes the place of ours; add --hybrid-backend stock: "
            f"--radix-cache-backend {namespace.radix_cache_backend}"
        )
    return "hybrid"


def _activation_dtype(namespace: Any, model: Model, on_cpu: bool) -> str | None:
    """The type SGLang will compute in; None where only the engine can know."""
    asked: str = {"half": "float16", "float": "float32"}.get(namespace.dtype, namespace.dtype)
    if asked != "auto":
        return asked
    config = model.config or {}
    nested = config.get("text_config") or {}
    stored = next((c[key] for c in (config, nested) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    if on_cpu:
        return "bfloat16" if stored == "bfloat16" else "float32"  # half precision is emulated on most CPUs
    return "float16" if stored == "float32" else stored  # what SGLang's `auto` makes of float32 weights
