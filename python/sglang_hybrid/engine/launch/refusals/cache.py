"""What files states under wrong lengths or caches none, and what our cache does otherwise."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch.flags import spelled
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.prefix import policies


def check(namespace: Any, asked: Any, config: HybridConfig, model: Model) -> None:
    """Raise ConfigError for such settings; `namespace` are SGLang's final ones, `asked` what the user gave."""
    _check_lazy(asked)
    _check_mixed_chunk(namespace, model)
    _check_ring(namespace)
    _check_chunks(namespace, model)
    _check_order(asked, config, model)
    _check_context_parallel(namespace, config, model)
    _check_halves(namespace, config, model)
    _check_experts(namespace, config)


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
