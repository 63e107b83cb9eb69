"""Puts elastic memory together for a cache that is being built; the pools under it exist already."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat, publish
from sglang_hybrid.engine.cache.memory import Parts
from sglang_hybrid.engine.pools import arena, telemetry
from sglang_hybrid.engine.pools.memory import ElasticMemory
from sglang_hybrid.memory.sizing import KV, STATE


def build(ctx: Any, config: HybridConfig, spec: ModelSpec, parts: Parts) -> ElasticMemory:
    """The memory of the cache that is built on `parts`; raises ConfigError where its pools are not ours."""
    if not arena.exists() or set(arena.current().supplies) != {KV, STATE}:
        raise unserved(type(ctx.params.token_to_kv_pool_allocator).__name__)
    if arena.current().kv_planes_left:
        raise unserved(f"{arena.current().kv_planes_left} planes of KV without a pool")
    labels = publish.labels()
    export = None if labels is None else telemetry.exporter(labels)
    interval_s = config.log_interval_s if compat.leads() else 0.0
    told = telemetry.Telemetry(arena.current(), parts.account.counts, interval_s, export)
    return ElasticMemory(parts, arena.current(), spec, told)


def described() -> dict[str, int]:
    """The budget of this process in the words of a request log (`prefix.log_schema.BUDGET`)."""
    sizing = arena.current().sizing
    return {
        "budget_bytes": sizing.total_bytes,
        "granule_bytes": sizing.granule_bytes,
        "kv_row_bytes": sizing.kinds.kv_row_bytes,
        "kv_planes": sizing.kinds.kv_planes,
        "state_bytes": sizing.kinds.state_bytes,
        "request_states": sizing.request_states,
    }


def unserved(what: str) -> ConfigError:
    """What to raise where `what` stands in place of our pools or our cache."""
    return ConfigError(f"elastic memory needs pools and a cache of ours; add --hybrid-memory static: {what}")
