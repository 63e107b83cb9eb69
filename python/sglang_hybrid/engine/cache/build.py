"""Assembles the MambaRadixCache of one scheduler process."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat, publish
from sglang_hybrid.engine.cache import clock, hooks, metrics
from sglang_hybrid.engine.cache.checkpoint_slots import CheckpointSlots
from sglang_hybrid.engine.cache.coordinator import CacheCoordinator, Rules
from sglang_hybrid.engine.cache.memory import Parts, StaticMemory
from sglang_hybrid.engine.cache.passes import kernels, prefill_states
from sglang_hybrid.engine.cache.victims import Victims
from sglang_hybrid.engine.hicache import checks
from sglang_hybrid.engine.hicache.tier import HostTier, TieredVictims
from sglang_hybrid.engine.pools import build as elastic
from sglang_hybrid.engine.segments import build as segments
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.admission import Places
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog
from sglang_hybrid.prefix.seeds import read_prefixes

if TYPE_CHECKING:
    from sglang_hybrid.engine.cache.state_events import StateEvents

logger = logging.getLogger(__name__)


def build(ctx: Any, config: HybridConfig, spec: ModelSpec | None) -> Any:
    """Our cache where the model has recurrent states and the cost model knows it, otherwise the one SGLang chooses.

    Where prompts are computed by another server it is one of KV alone; other versions than the primary one have ours
    there too.
    """
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    if ctx.disable_radix_cache or not ctx.is_hybrid_ssm or spec is None or not spec.checkpoint_bytes:
        if config.memory == "elastic":
            raise elastic.unserved("SGLang's own cache")
        return default_radix_cache_factory(ctx)
    if compat.resolved(ctx.server_args).disaggregation_mode == "decode" and compat.engine_version() == compat.PRIMARY:
        from sglang_hybrid.engine.pairs import kv_cache

        return kv_cache.create(ctx)
    from sglang_hybrid.engine.cache import radix_cache

    if ctx.enable_hierarchical_cache:  # SGLang's own launcher checks nothing
        checks.require_version()
    if not (ctx.params.enable_mamba_extra_buffer or compat.resolved(ctx.server_args).disable_overlap_schedule):
        # A model of the hub, or one that is not known: `launch.unsettled` has not chosen for it.
        raise ConfigError(
            "SGLang chooses no strategy for the states of this model: while passes overlap it would cache them a token "
            "late, and answer wrongly; add --mamba-radix-cache-strategy no_buffer --disable-overlap-schedule: "
            f"{ctx.model_config.hf_config.architectures[0]}"
        )
    cache = radix_cache.create(ctx, partial(make_coordinator, ctx, config, spec))
    hooks.activate(cache.coordinator)
    return cache


def make_coordinator(ctx: Any, config: HybridConfig, spec: ModelSpec, cache: Any) -> CacheCoordinator:
    """The coordinator of one scheduler process, for the `cache` that is being built."""
    from sglang_hybrid.engine.cache.components import TYPES

    policy = policies.find(config.policy)
    admits = scores = not policy.stock
    args = compat.resolved(ctx.server_args)
    device = str(ctx.params.req_to_token_pool.mamba_pool.mamba_cache.temporal.device.type)
    prefill = prefill_states.of(ctx.tp_worker.model_runner, ctx.server_args, kernels.ours(device))
    grid = compat.checkpoint_grid() if ctx.params.enable_mamba_extra_buffer else 1
    # A host tier gives back what left the device: what LRU would hold in two tiers is not known here.
    guarded = scores and not ctx.enable_hierarchical_cache
    where = Places(grid, prefill.step, int(ctx.params.page_size))
    decisions = _decisions(ctx, config, spec, where, guarded)
    watched = TieredVictims if ctx.enable_hierarchical_cache else Victims
    pools: tuple[PoolKind, ...] = (PoolKind.STATES, PoolKind.KV)
    if ctx.enable_hierarchical_cache:
        pools += (PoolKind.HOST_STATES, PoolKind.HOST_KV)
    if config.memory == "elastic":
        pools += (PoolKind.BYTES,)
    victims = watched(decisions, TYPES["kv"], TYPES["state"], watches=scores, pools=pools)
    kernels.warm(ctx.params.req_to_token_pool.mamba_pool, ctx.tp_worker.model_runner)
    if ctx.tp_rank == 0:
        logger.info("kernels of the cache: %s", kernels.describe(device))
        if admits and not prefill.step:
            logger.warning(prefill.shortcoming())
    states, leads = ctx.params.req_to_token_pool.mamba_allocator, compat.leads()
    told = None if (labels := publish.labels()) is None else metrics.Exported(labels)
    interval_s = config.log_interval_s if leads else 0.0
    account = metrics.Account(states, interval_s, told and told.miss, told and told.event)
    parts = Parts(
        cache=cache,
        states=states,
        decisions=decisions,
        victims=victims,
        slots=CheckpointSlots(states),
        account=account,
        now=clock.share(clock.RankClock()).now if args.tp_size * args.pp_size > 1 else time.monotonic,
        tier=HostTier(cache, TYPES["state"], account.event) if ctx.enable_hierarchical_cache else None,
        events=_events(cache) if config.state_events == "published" else None,
    )
    memory = elastic.build(ctx, config, spec, parts) if config.memory == "elastic" else StaticMemory(parts)
    ends = frozenset(ctx.model_config.hf_eos_token_id or ())
    composer = segments.build(ctx, config, spec, parts.now, account.event, memory) if config.segments == "on" else None
    return CacheCoordinator(
        parts, memory, Rules(grid=grid, prefill=prefill, admits=admits, scores=scores, message_end_ids=ends), composer
    )


def _decisions(ctx: Any, config: HybridConfig, spec: ModelSpec, where: Places, guarded: bool) -> Decisions:
    if config.request_log and not ctx.tp_rank:
        shape = _shape(ctx, config, where.step)
        made: Decisions = RecordedDecisions(_log(config), spec, config.policy, where.grid, guarded, shape)
    else:
        made = Decisions(spec, config.policy, where=where, guarded=guarded)
    for tokens in read_prefixes(config.seed_prefixes):
        made.seed(tokens, 0.0)
    return made


def _shape(ctx: Any, config: HybridConfig, step: int) -> dict[str, int]:
    """What the simulator needs to play this server (`log_schema.SHAPE` and `BUDGET`), without sizes where it cannot."""
    pool, args = ctx.params.req_to_token_pool, compat.resolved(ctx.server_args)
    memory: dict[str, int] = {}
    if ctx.enable_hierarchical_cache or (config.memory == "elastic" and config.segments == "on"):
        pass
    elif config.memory == "elastic":
        memory = elastic.described()
    else:
        kv = ctx.params.token_to_kv_pool_allocator
        memory = {"states": int(pool.mamba_allocator.size), "kv_tokens": int(kv.size)}
    buffered = ctx.params.enable_mamba_extra_buffer
    return {
        **memory,
        "step": step,
        "chunk_tokens": max(0, int(args.chunked_prefill_size or 0)),
        "buffers": int(pool.mamba_ping_pong_track_buffer_size) if buffered else 0,
        "track_tokens": compat.track_tokens(int(args.mamba_track_interval or 0), int(ctx.params.page_size)),
        "page": int(ctx.params.page_size),
        "pass_states": compat.pass_states(lazy=bool(pool.enable_mamba_extra_buffer_lazy)),
    }


def _events(cache: Any) -> StateEvents:
    from sglang_hybrid.engine.cache.state_events import StateEvents  # what it imports is not in 0.5.17

    return StateEvents(cache)


def _log(config: HybridConfig) -> RequestLog:
    return RequestLog(
        Path(config.request_log).expanduser(), int(config.request_log_mb * 1e6), config.request_log_tokens == "plain"
    )
