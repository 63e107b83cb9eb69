"""The block a server logs once: what it really allocated, read from the tensors and not from the flags."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import DTYPE_BYTES, ModelSpec, engine_dtypes, from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.hooks import coordinator_of
from sglang_hybrid.engine.launch import slots
from sglang_hybrid.prefix import policies


@dataclass(frozen=True, slots=True)
class Pools:
    """Sizes of the pools of one scheduler process; slot 0 of each is SGLang's padding and not counted."""

    tokens: int
    kv_bytes: int
    states: int
    state_bytes: int
    candidate_bytes: int = 0
    """States that verification of speculative decoding leaves for every candidate; not part of `state_bytes`."""

    @property
    def bytes_per_token(self) -> float:
        return self.kv_bytes / self.tokens if self.tokens else 0.0

    @property
    def bytes_per_state(self) -> float:
        return self.state_bytes / (self.states + 1) if self.states else 0.0


def read_pools(req_to_token_pool: Any, allocator: Any) -> Pools:
    """Measure SGLang's pools."""
    pool = getattr(req_to_token_pool, "mamba_pool", None)
    whole = allocator.get_kvcache()
    kv = getattr(whole, "full_kv_pool", whole)  # a hybrid pool wraps the one of its attention layers
    buffers = [*getattr(kv, "k_buffer", ()), *getattr(kv, "v_buffer", ()), *getattr(kv, "kv_buffer", ())]
    kv_bytes = sum(b.nbytes * allocator.size // b.shape[0] for b in buffers)  # without the padding page
    index = [*getattr(kv, "index_k_with_scale_buffer", ()), *getattr(whole, "qsa_compressed_k_buffer_pool", ())]
    if index:
        kv_bytes += sum(b.nbytes for b in index) * allocator.size // (allocator.size + whole.page_size)
    if pool is None:
        return Pools(allocator.size, kv_bytes, 0, 0)
    cache = pool.mamba_cache
    candidates = [getattr(cache, "intermediate_ssm", None), *getattr(cache, "intermediate_conv_window", ())]
    candidate_bytes = sum(tensor.nbytes for tensor in candidates if tensor is not None)
    held_bytes, slots = cache.mem_usage_bytes() - candidate_bytes, (*cache.conv, cache.temporal)[0].shape[1]
    held_bytes += sum(tensor.nbytes for tensor in compat.beside_states(pool))
    state_bytes = held_bytes * (pool.size + 1) // slots  # elastic memory rounds addresses up to whole columns
    return Pools(allocator.size, kv_bytes, pool.size, state_bytes, candidate_bytes)


def start_block(ctx: Any, cache: Any, config: HybridConfig) -> list[str]:
    """Lines for the log: model, layers, bytes, capacity, cache, concurrency and what limits it."""
    args = compat.resolved(ctx.server_args)
    pools = read_pools(ctx.params.req_to_token_pool, ctx.params.token_to_kv_pool_allocator)
    spec = model_spec(ctx)
    lines = [
        "sglang-hybrid is active:",
        f"  model        {_name(ctx)}: {_layers(ctx, spec)}",
        f"  KV           {pools.tokens:,} tokens x {pools.bytes_per_token:,.0f} B = {_size(pools.kv_bytes)}",
    ]
    if pools.states:
        lines.append(
            f"  states       {pools.states:,} x {_size(pools.bytes_per_state)} = {_size(pools.state_bytes)}"
            f" (one state = {_equal_tokens(pools)} tokens of KV)"
        )
    if args.speculative_algorithm:
        lines.append(f"  candidates   {_candidates(args, pools)}")
    if config.memory == "elastic":
        budget = ctx.params.token_to_kv_pool_allocator.budget_bytes
        those = "all" if config.segments == "on" else "both"
        lines.append(f"  memory       elastic: {_size(budget)} for {those} together, each figure is for one alone")
    host = getattr(cache, "host_pool_group", None)
    if host is not None:
        sizes = {entry.name.value: entry.host_pool.logical_size for entry in host.entries}
        states = f", {sizes['mamba']:,} states" if "mamba" in sizes else ""
        lines.append(f"  host tier    {sizes['kv']:,} tokens of KV{states}, {args.hicache_write_policy}")
    lines += [
        f"  cache        {_policies(cache, config)}, {_strategy(ctx, args, pools, cache)}",
        *_prefill(cache),
        *_segments(cache, config),
        f"  concurrency  {_concurrency(ctx, args, pools)}",
    ]
    return lines + surprise(pools, spec)


def _candidates(args: Any, pools: Pools) -> str:
    """What speculates, and what its candidates hold."""
    nodes = f"{args.speculative_algorithm}, {args.speculative_num_draft_tokens} tokens verified at once"
    if not pools.candidate_bytes:
        return nodes
    share = pools.candidate_bytes / (pools.bytes_per_state or 1)
    return f"{nodes}, whose states take {_size(pools.candidate_bytes)}, as much as {share:,.0f} cached states"


def _segments(cache: Any, config: HybridConfig) -> list[str]:
    """What segments cost, and that they are approximations."""
    coordinator = coordinator_of(cache)
    composer = None if coordinator is None else coordinator.composer
    if composer is None:
        return []
    store, seams = composer.store, composer.seams
    least, matrices = store.state_bytes, store.transitions * store.transition_bytes
    thousand = least + matrices + 1024 * store.token_bytes
    states = _size(least + matrices)
    if matrices:
        states = f"{_size(least)} to {states}"
    size = _size(store.total_bytes)
    if config.memory == "elastic":
        size = f"up to {size}, shared with KV and states"
    others = []
    if config.peers:
        others = [f"               cold ones are computed by other servers as well: {', '.join(config.peers)}"]
    return [
        f"  segments     {size}, {store.total_bytes // thousand:,} of 1,024 tokens or more, each "
        f"{states} of states in {config.segment_dtype} and {_size(1024 * store.token_bytes)} of KV",
        f"               {seams.head} + {seams.tail} tokens at their ends are computed with every use; "
        "an answer over reused segments is an APPROXIMATION",
        *others,
    ]


def surprise(pools: Pools, spec: ModelSpec | None) -> list[str]:
    """A line if a state is not as large as the cost model says.

    Pools are made of whole columns or granules, so a share of one is a few bytes more than a state.
    """
    if spec is None or not pools.states or _size(pools.bytes_per_state) == _size(spec.checkpoint_bytes):
        return []
    return [f"  note         the cost model expected {spec.checkpoint_bytes:,} B per state"]


_SCALED = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def model_spec(ctx: Any) -> ModelSpec | None:
    """The cost model of the served model, None where its architecture is not known.

    KV has the type that SGLang chose: by --kv-cache-dtype, what a quantized checkpoint asks for, or --dtype.
    """
    kept = str(ctx.tp_worker.model_runner.kv_cache_dtype).removeprefix("torch.")
    kept = _SCALED.get(kept, kept)
    dtypes = engine_dtypes(os.environ) | ({"kv_dtype": kept} if kept in DTYPE_BYTES else {})
    try:
        spec = from_config(ctx.model_config.hf_config.to_dict(), **dtypes)
    except ConfigError:
        return None
    if compat.pools_index():
        spec = spec.with_pooled_index()
    return replace(spec, context_tokens=int(ctx.model_config.context_len))


def _name(ctx: Any) -> str:
    return f"{ctx.model_config.hf_config.architectures[0]} ({ctx.model_config.model_path})"


def _layers(ctx: Any, spec: ModelSpec | None) -> str:
    if spec is None:
        return f"{ctx.model_config.num_hidden_layers} layers, costs unknown"
    return ", ".join(f"{count} {kind}" for kind, count in spec.layer_counts.items())


def _equal_tokens(pools: Pools) -> str:
    return f"{pools.bytes_per_state / pools.bytes_per_token:,.0f}" if pools.bytes_per_token else "-"


def _policies(cache: Any, config: HybridConfig) -> str:
    if coordinator_of(cache) is None:
        return f"backend {config.backend}, {type(cache).__name__}, SGLang's own decisions"
    return f"MambaRadixCache, policy {config.policy}: {policies.find(config.policy).summary}"


def _prefill(cache: Any) -> list[str]:
    coordinator = coordinator_of(cache)
    if coordinator is None or not coordinator.admits:
        return []
    return [f"  prefill      {coordinator.prefill.summary()}"]


def _strategy(ctx: Any, args: Any, pools: Pools, cache: Any) -> str:
    if ctx.disable_radix_cache:
        return "prefix caching is off"
    page = ctx.params.page_size
    if not pools.states:
        return f"a prefix is reused to the page of {page} tokens"
    from sglang_hybrid.engine.pairs.kv_cache import KvCache

    if isinstance(cache, KvCache):
        return f"a prefix is reused to the page of {page} tokens: states come from the server that prefills"
    coordinator = coordinator_of(cache)
    if not ctx.params.enable_mamba_extra_buffer and coordinator is not None and coordinator.step:
        inside = "any token" if coordinator.step == 1 else f"a state every {coordinator.step} tokens of a prefill"
        return f"no_buffer: a prefix is reused to {inside}"
    if not ctx.params.enable_mamba_extra_buffer:
        return "no_buffer: a prefix is reused only from the exact end of an earlier prompt or answer"
    grid = compat.checkpoint_grid()
    return f"{args.mamba_radix_cache_strategy}: a prefix is reused to the checkpoint grid of {grid} tokens"


def _concurrency(ctx: Any, args: Any, pools: Pools) -> str:
    running = ctx.tp_worker.model_runner.max_running_requests
    bounds = {"--max-running-requests": args.max_running_requests, "KV tokens": pools.tokens // 2}
    if pools.states:
        each = slots.per_request_of(args)
        bounds[f"states at {each} slots per request"] = pools.states // each
    tight = [name for name, bound in bounds.items() if bound is not None and bound <= running]
    return f"{running} requests at once, limited by {' and '.join(tight) or 'SGLang'}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
