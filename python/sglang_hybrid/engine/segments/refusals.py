"""What segments cannot be served with, said before a model is loaded."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import LatentAttention
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch.flags import spelled

_ROWS = "a composed pass has other rows, and requests beside it would get them"
_FLAGS = {
    "disable_radix_cache": "a composed prompt is kept in the cache, so it must be on",
    "enable_unified_memory": "SGLang's unified pool moves KV while a pass runs",
    "enable_page_major_kv_layout": "KV and states are read layer by layer",
    "enable_linear_replayssm": "a composed state has no ring of inputs behind it",
    "enable_linear_replayssm_spec": "a composed state has no ring of inputs behind it",
    "enable_int8_mamba_checkpoint": "checkpoints of composed prompts are states of the pool",
    "enable_mixed_chunk": "a pass of composed prompts decodes nobody",
    "enable_two_batch_overlap": "a composed pass cannot be split between two streams",
    "enable_dp_attention": "it was not tried with data parallel attention",
    "enable_lora": "it was not tried with adapters",
    "lora_paths": "it was not tried with adapters",
    "enable_deterministic_inference": "it ends passes at places of its own",
    "rl_on_policy_target": "it ends passes at places of its own",
    "enable_hierarchical_cache": "it was not tried with a host tier",
    "enable_return_hidden_states": _ROWS,
    "return_hidden_states_mode": _ROWS,
    "prefill_decode_interval": "a composed prompt whose next segment waits for memory would take all of it",
    "enable_session_radix_cache": "sessions order evictions by themselves",
    "prefill_only_disable_kv_cache": "there is no KV to copy",
}
"""Flags that imply another stand beside it: what SGLang makes of them is not known yet."""

_AT_MOST_ONE = ("pp_size", "dp_size", "attn_dp_size", "dcp_size", "attn_cp_size")
_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")


def check(namespace: Any, config: HybridConfig, spec: ModelSpec | None) -> None:
    """Raise ConfigError if segments were asked for and cannot work with SGLang's final settings `namespace`."""
    if config.segments != "on":
        if config.segment_peers:
            raise ConfigError(
                "other servers compute segments only where they are served; add --hybrid-segments on or drop "
                f"--hybrid-segment-peers: {config.segment_peers}"
            )
        return
    if config.segment_peers and (getattr(namespace, "nnodes", 1) or 1) > 1:
        raise ConfigError(
            "segments go to and from servers of one machine each; drop --hybrid-segment-peers or --nnodes: "
            f"{namespace.nnodes}"
        )
    if config.backend != "hybrid":
        raise _refusal("composed prompts live in our cache", f"--hybrid-backend {config.backend}")
    if not compat.complete():
        raise _refusal(f"they were run with SGLang {' and '.join(compat.COMPLETE)} only", compat.engine_version())
    for name, reason in _FLAGS.items():
        if getattr(namespace, name, None):
            raise _refusal(reason, spelled(name))
    _check_drafts(namespace, spec)
    for name in _AT_MOST_ONE:
        if (getattr(namespace, name, 1) or 1) > 1:
            raise _refusal(
                "of several ranks, only tensor-parallel ones agree about entries",
                f"{spelled(name)} {getattr(namespace, name)}",
            )
    if getattr(namespace, "disaggregation_mode", "null") != "null":
        raise _refusal("PD transfers what one pass computed", f"--disaggregation-mode {namespace.disaggregation_mode}")
    if getattr(namespace, "schedule_policy", None) == "shortest-prefill-first":
        raise _refusal(
            "a chunk that shorter prompts are let past cannot end inside a segment",
            "--schedule-policy shortest-prefill-first",
        )
    if namespace.kv_cache_dtype not in _DTYPES:
        raise _refusal("scaled keys cannot be turned", f"--kv-cache-dtype {namespace.kv_cache_dtype}")
    _check_model(namespace, config, spec)


def _check_model(namespace: Any, config: HybridConfig, spec: ModelSpec | None) -> None:
    if spec is None or not spec.kv_bytes_per_token or not spec.is_recurrent:
        raise _refusal("this model is not known to have both KV and recurrent states", namespace.model_path)
    if spec.is_beside:
        raise _refusal(
            "an entry has KV and states, and not the index or the states of n-grams that this model keeps beside them",
            namespace.model_path,
        )
    latent = [layer for layer in spec.layers if isinstance(layer, LatentAttention)]
    if any(layer.rotary for layer in latent):
        raise _refusal("latent KV (MLA) is moved only where it has no rotary positions", namespace.model_path)
    if any(layer.extra_weights for layer in latent):
        raise _refusal("latent attention with an output gate was not tried", namespace.model_path)
    if latent and config.memory == "elastic":
        raise _refusal("latent KV (MLA) shares no budget with segments", "--hybrid-memory elastic")
    other = {layer.kind for layer in spec.layers if layer.temporal_elements(1) or layer.conv_elements(1)} - _KINDS
    if other:
        raise _refusal(
            "states of gated delta rules, Kimi delta attention and Mamba-2 are composed, not those of",
            ", ".join(sorted(other)),
        )


def _check_drafts(namespace: Any, spec: ModelSpec | None) -> None:
    """N-grams have no layers, and a model's own head has one more of the same attention; others are unknown here."""
    algorithm, path = namespace.speculative_algorithm, namespace.speculative_draft_model_path
    if algorithm is None or algorithm.upper() == "NGRAM":
        return
    if algorithm.upper() not in ("NEXTN", "EAGLE"):
        raise _refusal("only n-grams and a model's own head have seams", f"--speculative-algorithm {algorithm}")
    if path not in (None, namespace.model_path):
        raise _refusal("only a model's own head has seams", f"--speculative-draft-model-path {path}")
    if spec is not None and any(isinstance(layer, LatentAttention) for layer in (*spec.layers, *spec.head)):
        raise _refusal("a head over latent KV (MLA) was not tried", f"--speculative-algorithm {algorithm}")
    dtype = getattr(namespace, "speculative_draft_kv_cache_dtype", None)
    if dtype not in (None, namespace.kv_cache_dtype):
        raise _refusal("the head's KV is kept as the model's is", f"--speculative-draft-kv-cache-dtype {dtype}")
    if getattr(namespace, "enable_multi_layer_eagle", False):
        raise _refusal("heads of several steps were not tried", "--enable-multi-layer-eagle")


_KINDS = {"gdn", "kda", "mamba2"}


def _refusal(reason: str, value: str) -> ConfigError:
    return ConfigError(f"segments cannot be served: {reason}; change it or drop --hybrid-segments: {value}")
