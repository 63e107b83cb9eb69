"""Puts the segments of one scheduler together, from SGLang's model runner and pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache import forward as cache_forward
from sglang_hybrid.engine.cache import prefill_states
from sglang_hybrid.engine.segments import forward, rope, schedule
from sglang_hybrid.engine.segments.composer import Composer, Served
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, SegmentIndex

_FAMILIES = {"GDNAttnBackend": True, "Mamba2AttnBackend": False}
"""SGLang's backend of the linear layers -> whether a transition is a matrix."""


def build(
    ctx: Any, config: HybridConfig, spec: ModelSpec, now: Callable[[], float], count: Callable[..., None]
) -> Composer:
    """The composer of the scheduler whose cache is built in `ctx`; raises ConfigError where segments cannot be."""
    runner = ctx.tp_worker.model_runner
    backend = getattr(runner.attn_backend, "linear_attn_backend", None)
    kind = type(backend).__name__
    if kind not in _FAMILIES:
        raise ConfigError(f"segments are served for gated delta rules and Mamba-2; drop --hybrid-segments: {kind}")
    if prefill_states.is_one_graph(args := compat.resolved(ctx.server_args)):
        raise ConfigError(
            "segments change the shape of a prefill, which is one CUDA graph here; add --cuda-graph-backend-prefill "
            f"breakable or drop --hybrid-segments: {args.cuda_graph_config.prefill.backend}"
        )
    states, kv = ctx.params.req_to_token_pool, ctx.params.token_to_kv_pool_allocator.get_kvcache()
    attention = sorted(kv.full_attention_layer_id_mapping)
    keys, values = kv.get_kv_buffer(attention[0])
    cache = states.mamba_pool.mamba_cache
    if len(cache.conv) != 1:
        raise ConfigError(f"segments need one convolution window a layer: {len(cache.conv)}")
    shapes = Shapes(
        linear_layers=len(states.mamba_map),
        temporal=tuple(cache.temporal.shape[2:]),
        window=tuple(cache.conv[0].shape[2:]),
        window_dtype=cache.conv[0].dtype,
        dense=_FAMILIES[kind],
        attention_layers=len(attention),
        kv_heads=keys.shape[1],
        key_size=keys.shape[2],
        value_size=values.shape[2],
        kv_dtype=keys.dtype,
    )
    store = Store(shapes, config.segment_dtype, int(config.segment_memory_gb * 1e9), keys.device)
    served = Served(
        linear_layers=dict(states.mamba_map),
        attention_layers={layer: number for number, layer in enumerate(attention)},
        frequencies=rope.frequencies(runner.model),
        page_size=int(ctx.params.page_size),
        most=schedule.most_tokens(args.chunked_prefill_size),
        mode=config.segment_mode,
    )
    cache_forward.mixing = forward.mix
    index = SegmentIndex(store.blocks, Costs(spec, store.state_bytes, store.token_bytes))
    about = (ctx.model_config.model_path, str(runner.dtype), config.segment_dtype, config.segment_mode, args.tp_size)
    return Composer(store, index, Seams(config.seam_tokens, shapes.window[-1]), repr(about), served, now, count)
