"""What takes a GPU, on a CPU: kernels end the start, or the first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_hybrid.core import quantized
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cpu import sgl_kernel
from sglang_hybrid.engine.launch.flags import spelled
from sglang_hybrid.engine.launch.models import Model

_CPU_ATTENTION = ("torch_native", "intel_amx")
_CPU_RECURRENCE = ("triton",)
"""By this name SGLang's dispatcher finds the operations of the CPU platform."""

_ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_PASSES = ("", "prefill_", "decode_", "verify_")
_RECURRENCE = ("mamba_backend", *(f"linear_attn_{which}backend" for which in _PASSES))
_OFFLOADED = ("cpu_offload_gb", "offload_group_size")
_ON_GPU = (
    "enable_torch_compile",
    "enable_forward_pass_metrics",
    "enable_deterministic_inference",
    "rl_on_policy_target",
    "enable_strict_thinking",
    "enable_linear_replayssm",
)
_SCALED = ("fp8_e4m3", "fp8_e5m2")


def check(namespace: Any, model: Model) -> None:
    """Raise ConfigError for such settings; `namespace` are SGLang's final ones."""
    _check_kernels(namespace)
    _check_quantized(namespace, model)


def _check_kernels(namespace: Any) -> None:
    """Kernels of GPUs end the start, or the first request."""
    for names, here in ((_ATTENTION, _CPU_ATTENTION), (_RECURRENCE, _CPU_RECURRENCE)):
        for name in names:
            chosen = getattr(namespace, name, None)
            if chosen is not None and chosen not in here:
                raise ConfigError(f"on a CPU there is {' or '.join(here)}; drop: {spelled(name)} {chosen}")
    for name in _ON_GPU:
        if getattr(namespace, name, False):
            raise ConfigError(f"SGLang's code for it is CUDA's; drop: {spelled(name)}")
    if namespace.kv_cache_dtype in _SCALED:
        raise ConfigError(
            "attention on this CPU reads no scaled KV; use auto or bfloat16: "
            f"--kv-cache-dtype {namespace.kv_cache_dtype}"
        )
    for name in _OFFLOADED:
        if (getattr(namespace, name, 0) or 0) > 0:
            raise ConfigError(f"weights are on the CPU already; drop: {spelled(name)} {getattr(namespace, name)}")


def _check_quantized(namespace: Any, model: Model) -> None:
    """SGLang multiplies by quantized weights with compiled kernels; without them the scheduler ends as it loads."""
    how = namespace.quantization or (model.config and quantized.method(model.config, Path(model.path).expanduser()))
    if how not in (None, "unquant") and not sgl_kernel.is_real():
        raise ConfigError(
            "quantized weights need a GPU, or a CPU with SGLang's own kernels; serve the checkpoint that is not: "
            f"{f'--quantization {how}' if namespace.quantization else f'{model.path} ({how})'}"
        )
