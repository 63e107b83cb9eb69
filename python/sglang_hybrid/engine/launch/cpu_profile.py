"""Defaults for serving on a plain CPU: starts in seconds, fits a laptop, and caches like a GPU would."""

from __future__ import annotations

import os
from dataclasses import replace
from decimal import Decimal
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.served import ARCHITECTURES
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine.hicache import copies
from sglang_hybrid.engine.launch import slots
from sglang_hybrid.engine.speculation import drafts
from sglang_hybrid.engine.speculation.checks import candidate_bytes, draft_tokens

_MOST_TOKENS = 1 << 18
"""Beyond a quarter of a million tokens a small model's pool only costs start-up time."""

_MOST_STATES = 512
_LEAST_TOKENS = 2048
_MOST_REQUESTS = 16

_CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
"""Three guesses in a row. SGLang's default for some models is a tree of eight nodes, each as costly as a token here."""


def flags(
    namespace: Any, config: HybridConfig, spec: ModelSpec | None, dtype: str, architecture: str = ""
) -> dict[str, Any]:
    """SGLang flags to add where the user gave none, for `architecture` and activations of type `dtype`.

    Raises ConfigError if the budget holds not one request.
    """
    chosen: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sleep_on_idle": True,  # an idle scheduler would otherwise keep a core busy
        # The budget sizes the pools. SGLang would set gigabytes aside for activations of a GPU, and start on no machine
        # that has not more, nor with --chunked-prefill-size -1.
        "mem_fraction_static": 0.9,
    }
    overlap = config.cpu_event_loop == "overlap"
    row = ARCHITECTURES.get(architecture)
    buffered = row is None or row.extra_buffer
    if overlap:
        _check_overlap(namespace.mamba_radix_cache_strategy, buffered, architecture)
    if not overlap and namespace.mamba_radix_cache_strategy != "extra_buffer_lazy":  # SGLang has it with overlap only
        chosen["disable_overlap_schedule"] = True  # there is no stream to overlap with
    if namespace.max_running_requests is None:
        chosen["max_running_requests"] = _MOST_REQUESTS
    if namespace.dtype == "auto":
        chosen["dtype"] = dtype
    if namespace.enable_hierarchical_cache:
        chosen |= {"hicache_io_backend": copies.IO_BACKEND, "hicache_mem_layout": copies.LAYOUT}
        if namespace.hicache_ratio is None and not namespace.hicache_size:
            chosen["hicache_ratio"] = 2.0  # as on a GPU, without sizing by all of the machine's memory
    if namespace.enable_lora or namespace.lora_paths:
        chosen["lora_backend"] = "torch_native"  # the only one without Triton
    algorithm = namespace.speculative_algorithm
    said = (namespace.speculative_num_steps, namespace.speculative_eagle_topk, namespace.speculative_num_draft_tokens)
    if algorithm not in (None, "NGRAM") and said == (None, None, None):
        chosen |= _CHAIN
    if spec is None:
        return chosen
    if spec.is_recurrent and namespace.mamba_radix_cache_strategy == "auto":
        # no_buffer never serves an exact repeat, but is all that SGLang has for some
        chosen["mamba_radix_cache_strategy"] = "extra_buffer" if buffered else "no_buffer"
    if config.memory != "elastic":  # there sizes follow from the budget where the pools are built
        chosen |= _pool_sizes(namespace, config, spec.with_dtypes(kv_dtype=dtype, conv_dtype=dtype), dtype)
    return chosen


def _pool_sizes(namespace: Any, config: HybridConfig, spec: ModelSpec, dtype: str) -> dict[str, int]:
    """Flags that give the pools the budget's bytes, beside what drafts take; and no more requests than fit."""
    chosen: dict[str, int] = {}
    overlap = config.cpu_event_loop == "overlap"
    requests = namespace.max_running_requests or _MOST_REQUESTS
    taken_bytes = candidate_bytes(draft_tokens(namespace), requests, spec.checkpoint_bytes)
    drafted_bytes = drafts.kv_bytes_per_token(namespace, spec, dtype)
    spec = replace(spec, kv_bytes_per_token=spec.kv_bytes_per_token + drafted_bytes)
    tokens, states = sizes(config.cpu_memory_bytes, spec, overlap, taken_bytes)
    if namespace.max_total_tokens is None:
        chosen["max_total_tokens"] = tokens
    if spec.is_recurrent and namespace.max_mamba_cache_size is None:
        chosen["max_mamba_cache_size"] = states
        if namespace.max_running_requests is None:
            least = slots.per_request("extra_buffer", overlap)
            chosen["max_running_requests"] = max(1, min(_MOST_REQUESTS, states // least))
    return chosen


def _check_overlap(strategy: str, buffered: bool, architecture: str) -> None:
    if not buffered:
        raise ConfigError(
            "SGLang runs this model without extra_buffer, in its normal event loop only; drop --hybrid-cpu-event-loop "
            f"overlap: {architecture}"
        )
    if strategy == "no_buffer":
        raise ConfigError(
            "SGLang runs no_buffer in its normal event loop only; drop --hybrid-cpu-event-loop overlap or add "
            f"--mamba-radix-cache-strategy extra_buffer: {strategy}"
        )


def sizes(budget_bytes: int, spec: ModelSpec, overlap: bool = False, taken_bytes: int = 0) -> tuple[int, int]:
    """Tokens and states for a byte budget: states get half of it, at most; the rest is KV.

    With the `overlap` event loop a request takes one state more. `taken_bytes` of the budget are something else's.
    """
    budget_bytes -= taken_bytes
    least = slots.per_request("extra_buffer", overlap) if spec.is_recurrent else 0
    states = min(_MOST_STATES, budget_bytes // 2 // spec.checkpoint_bytes) if least else 0
    left_bytes = budget_bytes - states * spec.checkpoint_bytes
    tokens = min(_MOST_TOKENS, left_bytes // spec.kv_bytes_per_token if spec.kv_bytes_per_token else _MOST_TOKENS)
    if states < least or tokens < _LEAST_TOKENS:
        halves_bytes = least * spec.checkpoint_bytes, _LEAST_TOKENS * spec.kv_bytes_per_token
        need_bytes = 2 * max(halves_bytes) if least else halves_bytes[1]
        taken = f", beside {taken_bytes:,} bytes of candidates of speculation" if taken_bytes else ""
        raise ConfigError(
            f"{_LEAST_TOKENS:,} tokens of KV and the {least} states of one request are the least, of "
            f"{spec.kv_bytes_per_token:,} and {spec.checkpoint_bytes:,} bytes each{taken}; raise "
            f"--hybrid-cpu-memory-gb to {_rounded_up_gb(need_bytes + taken_bytes)}: "
            f"{(budget_bytes + taken_bytes) / 1e9:g}"
        )
    return int(tokens), int(states)


def _rounded_up_gb(count: int) -> str:
    """`count` bytes in GB, with two digits that count."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return f"{Decimal(-(-count // unit) * unit) / 10**9:f}"


def environment(config: HybridConfig) -> dict[str, str]:
    """Environment variables to set where the user set none."""
    threads = config.cpu_threads or max(1, (os.cpu_count() or 2) // 2)  # the other half tokenises and serves HTTP
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # SGLang waits a minute for it
        # SGLang compiles some small functions when a request first needs them (penalties, drafts): seconds in which
        # everybody waits, and the scheduler's end on a machine without a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # Seconds after which uvicorn starts a silent HTTP worker over: SGLang's ten are less than its imports can take.
        "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120",
    }
