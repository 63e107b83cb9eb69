"""What SGLang's parser takes and its processes then end on, or answer wrongly by; said before a model is loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_hybrid.core import quantized
from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cpu import sgl_kernel
from sglang_hybrid.engine.launch import adapters, environment, misread, rust
from sglang_hybrid.engine.launch.flags import attention_groups, spelled
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.prefix import policies

_WHOLE = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
"""Models without pipeline stages, which end the start on an assertion (0.5.17 to 0.5.23)."""

_OVER_ALL_RANKS = ("KimiLinearForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
"""Models whose recurrent layers are cut by tensor parallelism alone, and their states by the groups of data-parallel
attention: the first pass ends on shapes (0.5.21 and 0.5.23)."""

_TIED = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")

_WITHOUT_POOLER = (
    "Qwen3NextForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM",
)  # fmt: skip

_CPU_ATTENTION = ("torch_native", "intel_amx")
_CPU_RECURRENCE = ("triton",)
"""By this name SGLang's dispatcher finds the operations of the CPU platform."""

_ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_PASSES = ("", "prefill_", "decode_", "verify_")
_RECURRENCE = ("mamba_backend", *(f"linear_attn_{which}backend" for which in _PASSES))
_COUNTS = ("page_size", "mamba_track_interval", "prefill_max_requests", "max_running_requests", "context_length")
"""Zero ends the start or the first request, or lets every request wait for ever."""

_LEAST_CONTEXT = 8
"""SGLang takes seven tokens of it and a prompt has one. With one in all the start ends on an assertion."""

_TRACING = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.exporter.otlp.proto.http")
"""What SGLang imports for traces. Other packages bring `opentelemetry` itself."""

_DELAYER = "SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE"
"""The variable that stands for `--enable-prefill-delayer`."""

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


def check(namespace: Any, asked: Any, config: HybridConfig, model: Model, on_cpu: bool) -> None:
    """Raise ConfigError for such settings; `namespace` are SGLang's final ones, `asked` what the user gave."""
    _check_counts(namespace)
    _check_lazy(asked)
    _check_mixed_chunk(namespace, model)
    _check_ring(namespace)
    _check_chunks(namespace, model)
    misread.check(namespace, model)
    _check_stages(namespace, model)
    _check_groups(namespace, model)
    adapters.check_groups(namespace, on_cpu)
    _check_order(asked, config, model)
    _check_context_parallel(namespace, config, model)
    _check_multiplexed(namespace, model)
    _check_diffusion(namespace, model)
    _check_halves(namespace, config, model)
    _check_detokenizers(namespace)
    _check_actors(namespace)
    _check_keys(namespace)
    _check_delayer(namespace, on_cpu)
    _check_experts(namespace, config)
    _check_pooling(namespace, model)
    _check_tracing(namespace)
    _check_grpc(namespace)
    rust.check(namespace, config)
    if on_cpu:
        _check_cpu(namespace)
        _check_quantized(namespace, model)
        adapters.check(namespace, model)


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


def _check_lazy(namespace: Any) -> None:
    """The scheduler would end on an assertion."""
    if namespace.mamba_radix_cache_strategy != "extra_buffer_lazy" or namespace.disable_radix_cache:
        return
    without = "--disable-overlap-schedule" if namespace.disable_overlap_schedule else None
    if namespace.pp_size > 1:
        without = f"--pipeline-parallel-size {namespace.pp_size}"
    if without is not None:
        raise ConfigError(
            "extra_buffer_lazy saves a slot that only the overlap schedule takes, and SGLang refuses it without; use "
            f"--mamba-radix-cache-strategy extra_buffer: {without}"
        )


def _check_mixed_chunk(namespace: Any, model: Model) -> None:
    """SGLang would file states under wrong lengths, and answer wrongly, whatever the cache.

    A decoding request that shares a pass with a prefill is not tracked in it, but counted as if it was.
    """
    strategy = namespace.mamba_radix_cache_strategy
    tracked = strategy != "no_buffer" and (model.is_recurrent or strategy != "auto")
    if namespace.enable_mixed_chunk and tracked and not namespace.disable_radix_cache:
        raise ConfigError(
            "with --enable-mixed-chunk SGLang caches states at wrong positions under this strategy, and answers go "
            f"wrong; drop the flag or add --mamba-radix-cache-strategy no_buffer: {strategy}"
        )


def _check_ring(namespace: Any) -> None:
    """The last tokens of an answer are in a ring beside its state; what extends the state begins without them.

    Steps of decoding know of the ring. A mixed pass and the next turn of a streaming session do not (0.5.17 to 0.5.23).
    """
    for name in ("enable_mixed_chunk", "enable_streaming_session"):
        if getattr(namespace, "enable_linear_replayssm", False) and getattr(namespace, name, False):
            raise ConfigError(
                "the state that --enable-linear-replayssm leaves lacks the last tokens, SGLang goes on from it all the "
                f"same, and answers go wrong; drop one of them: {spelled(name)}"
            )


def _check_chunks(namespace: Any, model: Model) -> None:
    """No pass would reach a state that its kernel gives back, and nothing would ever be cached, or another state is.

    On a CPU ours gives those inside a chunk of the delta rules too, but passes that begin off the grid miss it.
    """
    spec, chunk = model.spec, namespace.chunked_prefill_size or 0
    if spec is None or namespace.disable_radix_cache or namespace.mamba_radix_cache_strategy == "no_buffer":
        return
    if spec.is_recurrent and 0 < chunk < spec.chunk_tokens:
        raise ConfigError(
            f"states of this model lie {spec.chunk_tokens} tokens apart, and from shorter chunks of a prompt none is "
            f"cached; give --chunked-prefill-size {spec.chunk_tokens} or more: {chunk}"
        )
    page = namespace.page_size or 1
    if spec.is_recurrent and page > spec.chunk_tokens and not compat.at_least("0.5.21"):
        raise ConfigError(
            "before 0.5.21 SGLang looks for states a page apart, where they are nearer, and answers go wrong; use "
            f"--page-size {spec.chunk_tokens}: {page}"
        )
    interval = namespace.mamba_track_interval or spec.chunk_tokens
    if "mamba2" in spec.layer_counts and interval < spec.chunk_tokens:  # an assertion behind the loading of the model
        raise ConfigError(
            f"SGLang serves no Mamba-2 model whose answers are saved more often than every {spec.chunk_tokens} tokens, "
            f"the kernel's chunk; give --mamba-track-interval {spec.chunk_tokens} or more: {interval}"
        )


def _check_stages(namespace: Any, model: Model) -> None:
    """SGLang does not cut every model into pipeline stages, and of some the answers would be random.

    Of Qwen3.5 as text with tied embeddings the last stage has a head of its own that nothing is loaded into.
    """
    if namespace.pp_size < 2 or model.config is None:
        return
    name = model.architecture
    if name in _WHOLE:
        raise ConfigError(f"SGLang cuts no {name} into pipeline stages; use --tp-size: --pp-size {namespace.pp_size}")
    if name in _TIED and model.config.get("tie_word_embeddings"):
        raise ConfigError(
            f"the last pipeline stage of {name} with tied embeddings has a head without weights in SGLang, and every "
            f"answer is wrong; use --tp-size: --pp-size {namespace.pp_size}"
        )


def _check_groups(namespace: Any, model: Model) -> None:
    """Data-parallel attention of a model whose states would not fit its layers; 0.5.23 has a flag of its own for it."""
    count, given = attention_groups(namespace), "--attn-dp-size"
    if namespace.enable_dp_attention:
        given = "--enable-dp-attention --dp-size"
    weights = getattr(namespace, "dwdp_size", 1) or 1  # implies both
    if weights > 1 or (count > 1 and getattr(namespace, "enable_dp_attention_local_control_broadcast", False)):
        asked = f"--dwdp-size {weights}" if weights > 1 else "--enable-dp-attention-local-control-broadcast"
        raise ConfigError(
            "each group of ranks would get updates of weights and releases of memory in a pass of its own, and the "
            f"server hangs or answers with a part of the new weights; drop: {asked}"
        )
    if count < 2 or model.config is None or model.architecture not in _OVER_ALL_RANKS:
        return
    raise ConfigError(
        f"SGLang has no data-parallel attention for {model.architecture}; use --tp-size without it: {given} {count}"
    )


def _check_order(asked: Any, config: HybridConfig, model: Model) -> None:
    """SGLang's order of eviction would be ignored in silence: our cache has one of its own."""
    order = asked.radix_eviction_policy
    ours = config.backend == "hybrid" and model.is_recurrent
    if order != "lru" and ours and not policies.find(config.policy).stock:
        raise ConfigError(
            "our cache evicts by --hybrid-policy, not by this; drop it, or let SGLang evict with --hybrid-policy lru: "
            f"--radix-eviction-policy {order}"
        )
    cap = getattr(asked, "mamba_max_states_per_path", -1)  # since 0.5.21
    if ours and cap > 0:  # the end of an answer would evict that of its prompt, which the same prompt resumes from
        raise ConfigError(
            "our cache keeps the states that save the most, and a cap takes those of prompts from it; drop it, or add "
            f"--hybrid-backend stock: --mamba-max-states-per-path {cap}"
        )


def _check_context_parallel(namespace: Any, config: HybridConfig, model: Model) -> None:
    """A page of the tree is one of every rank together; states would be filed under prefixes shorter than they saw."""
    ranks = getattr(namespace, "dcp_size", 1) or 1
    if ranks > 1 and config.backend == "hybrid" and model.is_recurrent:
        raise ConfigError(
            "our cache saves states at tokens where no page of several context-parallel ranks ends, and answers would "
            f"be wrong; drop it or add --hybrid-backend stock: --dcp-size {ranks}"
        )


def _check_multiplexed(namespace: Any, model: Model) -> None:
    """A prefill beside a decode runs a few layers at a time, by a method that no hybrid model has (0.5.17 on)."""
    if getattr(namespace, "enable_pdmux", False) and model.is_recurrent:
        raise ConfigError(
            f"SGLang cannot run the layers of {model.architecture} a few at a time, and its scheduler would end at the "
            "first request; drop: --enable-pdmux"
        )


def _check_diffusion(namespace: Any, model: Model) -> None:
    """The start would end in a traceback: SGLang knows how a few models diffuse, none of them with states."""
    algorithm = getattr(namespace, "dllm_algorithm", None)
    if algorithm is not None and model.is_recurrent:
        raise ConfigError(
            f"{model.architecture} is no diffusion model, it says one token after the other; drop: "
            f"--dllm-algorithm {algorithm}"
        )


def _check_halves(namespace: Any, config: HybridConfig, model: Model) -> None:
    """Two halves of a batch that overlap: a half has no fields for the states that are saved (0.5.17 to 0.5.23).

    With the extra buffer the scheduler ends at the first batch that it cuts; without it no state of ours is saved.
    """
    if not getattr(namespace, "enable_two_batch_overlap", False) or namespace.disable_radix_cache:
        return
    saved = namespace.mamba_radix_cache_strategy != "no_buffer" or config.backend == "hybrid"
    if model.is_recurrent and saved:
        raise ConfigError(
            "SGLang cannot cut a batch in two whose states are cached (with the extra buffer its scheduler ends at the "
            "first one); drop this or add --disable-radix-cache: --enable-two-batch-overlap"
        )


def _check_actors(namespace: Any) -> None:
    if getattr(namespace, "use_ray", False):
        raise ConfigError(
            "SGLang's Ray actors load no plugins, so this package would not be in them; start a process per rank, or "
            "sglang-hybrid cluster for replicas, and drop: --use-ray"
        )


def _check_detokenizers(namespace: Any) -> None:
    """The detokenizers' router ends on the first request that no HTTP worker has signed (0.5.17 to 0.5.23)."""
    count = getattr(namespace, "detokenizer_worker_num", 1) or 1
    if count > 1 and (namespace.tokenizer_worker_num or 1) < 2:
        raise ConfigError(
            "with several detokenizers and one HTTP process SGLang ends at the first request; add "
            f"--tokenizer-worker-num 2 or drop: --detokenizer-worker-num {count}"
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


def _check_experts(namespace: Any, config: HybridConfig) -> None:
    """SGLang notes experts by KV slot where they were computed; whatever comes from elsewhere has those of others."""
    if not getattr(namespace, "enable_return_routed_experts", False):
        return
    elsewhere = {
        "--enable-hierarchical-cache": namespace.enable_hierarchical_cache,
        f"--disaggregation-mode {namespace.disaggregation_mode}": namespace.disaggregation_mode != "null",
        "--hybrid-segments on": config.segments == "on",
        f"--pp-size {namespace.pp_size}": namespace.pp_size > 1,
        f"--chunked-prefill-size {namespace.chunked_prefill_size}": (namespace.chunked_prefill_size or 0) < 0,
    }
    for flag, given in elsewhere.items():
        if given:
            raise ConfigError(
                "SGLang knows the experts of the tokens that this process computed in chunks, and would return those "
                f"of others for the rest; drop --enable-return-routed-experts or: {flag}"
            )


def _check_pooling(namespace: Any, model: Model) -> None:
    """The scheduler would end on the first request."""
    if namespace.is_embedding and model.architecture in _WITHOUT_POOLER:
        raise ConfigError(f"SGLang makes no embeddings with this model; drop --is-embedding: {model.architecture}")


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


def _check_cpu(namespace: Any) -> None:
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
