"""What elastic memory cannot serve, said before a model is loaded."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import slots
from sglang_hybrid.engine.launch.flags import attention_groups, spelled
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.engine.speculation import drafts
from sglang_hybrid.engine.speculation.checks import candidate_bytes, draft_tokens
from sglang_hybrid.engine.surface import check as surface
from sglang_hybrid.memory.sizing import HOST, Kinds, choose
from sglang_hybrid.prefix import policies

_VERIFY = "linear_attn_verify_backend"
_SIZES = ("max_total_tokens", "max_mamba_cache_size")

_FLAGS = {
    "disable_radix_cache": "its evictions keep the balance, so the cache must be on",
    "enable_unified_memory": "SGLang's unified pool is another answer to the same question",
    "enable_page_major_kv_layout": "the layouts of the pools are its own",
    "enable_linear_replayssm": "replay rings are sized by state slot",
    "enable_linear_replayssm_spec": "replay rings are sized by state slot",
    "enable_int8_mamba_checkpoint": "int8 checkpoints live in a pool of their own",
    "enable_return_routed_experts": "slots of KV reach beyond the rows that SGLang has for experts",
    "enable_memory_saver": "it gives memory back by itself",
    "enable_mixed_chunk": "decoding requests inside a prefill are not reserved for",
    "enable_hisparse": "sparse KV has pools of its own",
    "enable_session_radix_cache": "sessions order evictions by themselves",
    "enable_streaming_session": "sessions hold memory it cannot see",
    "prefill_only_disable_kv_cache": "there is no KV to share memory with",
}

_STRIDED = {"decode": ("triton", "flashinfer"), "prefill": ("triton", "flashinfer", "flashkda")}
_STRIDED_BY_CHANNEL = ("cutedsl", "helion")
"""Kernels of delta rules that read states wherever they lie, and more of Kimi delta attention's: SGLang's own lists for
states of all layers side by side (`kv_cache_hook.py` of 0.5.21 and 0.5.23). Others want a block of a layer's."""

_DRAFTING = ("NGRAM", "NEXTN", "EAGLE", "STANDALONE")

_AT_MOST_ONE = ("pp_size", "dcp_size")


def defaults(namespace: Any, config: HybridConfig, on_cpu: bool) -> dict[str, Any]:
    """Flags to add for elastic memory where the user gave none.

    Triton's verification reads states wherever they lie. FlashInfer's, which SGLang takes beside its prefill, copies
    the whole pool unless it is one block, and most of an elastic one has no memory.
    """
    drafted = namespace.speculative_algorithm is not None and hasattr(namespace, _VERIFY)
    return {_VERIFY: "triton"} if drafted and config.memory == "elastic" and not on_cpu else {}


def check(namespace: Any, rest: list[str], config: HybridConfig, model: Model, on_cpu: bool) -> None:
    """Raise ConfigError if elastic memory was asked for and cannot work with the other settings.

    `namespace` are SGLang's final settings, `rest` what the user gave.
    """
    if config.memory != "elastic":
        return
    if config.backend != "hybrid":
        raise _refusal("only our cache can evict across kinds", f"--hybrid-backend {config.backend}")
    if policies.find(config.policy).stock:
        raise _refusal("SGLang's order has one queue for KV and one for states", f"--hybrid-policy {config.policy}")
    if not compat.complete():
        raise _refusal(f"it was run with SGLang {' and '.join(compat.COMPLETE)} only", compat.engine_version())
    if missing := surface.missing(surface.required(compat.engine_version(), "elastic")):
        raise _refusal(f"SGLang {compat.engine_version()} lacks what it builds on", ", ".join(missing))
    _check_flags(namespace, rest)
    spec = model.spec
    if spec is None or not spec.is_recurrent or not spec.kv_bytes_per_token:
        raise _refusal("this model is not known to have both KV and recurrent states", namespace.model_path)
    if spec.is_beside:
        raise _refusal(
            "an index beside KV, or states of n-grams beside the pool of states, have no place in its pages",
            namespace.model_path,
        )
    if not spec.temporal_bytes or not spec.conv_bytes:
        raise _refusal("it was run with states that have a recurrent part and a window", namespace.model_path)
    spec = spec.per_rank(getattr(namespace, "tp_size", 1) // attention_groups(namespace))
    if namespace.speculative_algorithm is not None:
        _check_drafts(namespace, spec, on_cpu)
    if on_cpu:
        _check_budget(namespace, config, spec)
    else:
        _check_kernels(namespace, spec)


def _check_flags(namespace: Any, rest: list[str]) -> None:
    for name in _SIZES:
        if getattr(namespace, name, None) is not None:
            raise _refusal("it takes sizes from the budget; drop the flag", spelled(name))
    if any(argument.split("=")[0] == "--mamba-full-memory-ratio" for argument in rest):
        raise _refusal("it has no ratio; drop the flag", "--mamba-full-memory-ratio")
    for name, reason in _FLAGS.items():
        if getattr(namespace, name, None):
            raise _refusal(reason, spelled(name))
    for name in _AT_MOST_ONE:
        if (getattr(namespace, name, 1) or 1) > 1:
            raise _refusal(
                "of several ranks, only tensor-parallel ones agree about memory",
                f"{spelled(name)} {getattr(namespace, name)}",
            )
    if 1 < attention_groups(namespace) < namespace.tp_size:
        raise _refusal("data-parallel attention was run with one rank in a group", f"--tp-size {namespace.tp_size}")
    if namespace.enable_hierarchical_cache and getattr(namespace, "tp_size", 1) > 1:
        raise _refusal("a host tier was run with one rank only", f"--tp-size {namespace.tp_size}")
    if getattr(namespace, "disaggregation_mode", "null") != "null":
        raise _refusal("PD registers whole buffers", f"--disaggregation-mode {namespace.disaggregation_mode}")
    if namespace.mamba_radix_cache_strategy == "extra_buffer_lazy":
        raise _refusal("slots taken in mid-decode cannot wait", "--mamba-radix-cache-strategy extra_buffer_lazy")
    if namespace.kv_cache_dtype not in ("auto", "bfloat16", "bf16", "float16", "float32"):
        raise _refusal("scaled KV has pools of its own", f"--kv-cache-dtype {namespace.kv_cache_dtype}")


def _check_kernels(namespace: Any, spec: ModelSpec) -> None:
    """On a GPU: states of all layers of a slot lie side by side, so those of one layer lie apart."""
    for phase, kernels in _STRIDED.items():
        known = (*kernels, *_STRIDED_BY_CHANNEL) if "kda" in spec.layer_counts else kernels
        names = (f"linear_attn_{phase}_backend", "linear_attn_backend")  # the first that is given decides
        name = next(name for name in names if getattr(namespace, name) is not None)
        if (chosen := getattr(namespace, name)) not in known:
            raise _refusal(f"only {', '.join(known)} read states that lie apart", f"{spelled(name)} {chosen}")
    if namespace.mamba_backend not in (None, "triton"):
        raise _refusal("only Triton reads states that lie apart", f"--mamba-backend {namespace.mamba_backend}")


def _check_drafts(namespace: Any, spec: ModelSpec, on_cpu: bool) -> None:
    """KV of what drafts lies in the pages of the target's, in rows of the same size."""
    algorithm = f"--speculative-algorithm {namespace.speculative_algorithm}"
    if namespace.speculative_algorithm.upper() not in _DRAFTING:
        raise _refusal(f"it was run with {', '.join(_DRAFTING[:-1])} and {_DRAFTING[-1]} only", algorithm)
    if drafts.kv_planes(namespace, spec) is None:
        raise _refusal(
            f"what drafts must be known to keep rows of KV as large as the model's, {spec.kv_row_bytes:,} bytes",
            f"--speculative-draft-model-path {namespace.speculative_draft_model_path}",
        )
    verification = getattr(namespace, _VERIFY)
    if not on_cpu and verification != "triton":
        raise _refusal("only Triton verifies on states that lie apart", f"{spelled(_VERIFY)} {verification}")


def _check_budget(namespace: Any, config: HybridConfig, spec: ModelSpec) -> None:
    """A budget too small for one request is found before the model is loaded."""
    planes = spec.kv_planes + (drafts.kv_planes(namespace, spec) or 0)
    kinds = Kinds(spec.kv_row_bytes, planes, namespace.page_size or 1, spec.checkpoint_bytes)
    taken_bytes = candidate_bytes(draft_tokens(namespace), namespace.max_running_requests, spec.checkpoint_bytes)
    if taken_bytes >= config.cpu_memory_bytes:
        raise ConfigError(
            f"states of what is verified take {taken_bytes:,} bytes; lower --max-running-requests "
            f"{namespace.max_running_requests}, or raise --hybrid-cpu-memory-gb: {config.cpu_memory_gb}"
        )
    sizing = choose(kinds, config.cpu_memory_bytes - taken_bytes, HOST, slots.per_request_of(namespace))
    if sizing.tokens < LEAST_TOKENS:
        raise ConfigError(
            f"the budget leaves {sizing.tokens} tokens of KV beside the states of one request, at least "
            f"{LEAST_TOKENS} are needed; raise --hybrid-cpu-memory-gb: {config.cpu_memory_gb}"
        )


LEAST_TOKENS = 512
"""A prompt, its answer and SGLang's own head room."""


def _refusal(reason: str, value: str) -> ConfigError:
    return ConfigError(f"elastic memory cannot serve this: {reason}; change it or add --hybrid-memory static: {value}")
