"""Puts the segments of one scheduler together, from SGLang's model runner and pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.memory import Memory
from sglang_hybrid.engine.cache.passes import forward as cache_forward
from sglang_hybrid.engine.cache.passes import prefill_states
from sglang_hybrid.engine.pools import ranks
from sglang_hybrid.engine.pools.memory import ElasticMemory
from sglang_hybrid.engine.segments import forward, room, rope, schedule
from sglang_hybrid.engine.segments.composer import Composer, Served
from sglang_hybrid.engine.segments.exchange import Exchange
from sglang_hybrid.engine.segments.settling import Settling
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.engine.segments.warm import warm
from sglang_hybrid.engine.speculation import drafts
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, SegmentIndex
from sglang_hybrid.segment.leases import Leases

_FAMILIES = {"GDNAttnBackend": True, "KDAAttnBackend": True, "Mamba2AttnBackend": False}
"""SGLang's backend of the linear layers -> whether a transition is a matrix."""
_ABSORBED = ("TorchNativeAttnBackend", "TritonAttnBackend", "FlashAttentionBackend")
"""SGLang's backends that run latent attention absorbed in any prefill, as a pass of composed prompts has to."""


def build(
    ctx: Any,
    config: HybridConfig,
    spec: ModelSpec,
    now: Callable[[], float],
    count: Callable[..., None],
    memory: Memory,
) -> Composer:
    """The composer of the scheduler whose cache is built in `ctx`; raises ConfigError where segments cannot be."""
    runner, args = ctx.tp_worker.model_runner, compat.resolved(ctx.server_args)
    states, kv = ctx.params.req_to_token_pool, ctx.params.token_to_kv_pool_allocator.get_kvcache()
    linear = prefill_states.linear_backend(runner)
    _check_prefill(type(linear).__name__, args)
    attention = sorted(kv.full_attention_layer_id_mapping)
    buffers, latent = kv.get_kv_buffer(attention[0]), bool(getattr(kv, "use_mla", False))
    shapes = _shapes(runner, states, buffers, latent, len(attention), (drafts.kv_planes(args, spec) or 0) // 2)
    device = buffers[0].device
    served = Served(
        linear_layers=dict(states.mamba_map),
        attention_layers=tuple(attention),
        frequencies=_frequencies(runner, latent, device),
        page_size=int(ctx.params.page_size),
        most=schedule.most_tokens(args.chunked_prefill_size),
        mode=config.segment_mode,
    )
    elastic = memory if isinstance(memory, ElasticMemory) else None
    opened = None if elastic is None else partial(room.shared, elastic.arena, elastic.segment_limit(config))
    store = Store(shapes, config.segment_dtype, config.segment_bytes, device, opened)
    pooled, by_channel = states.mamba_pool.mamba_cache.temporal[0], prefill_states.is_by_channel(linear)
    warm(store, runner.model, kv, attention, pooled, by_channel, served.frequencies, served.most)
    cache_forward.mixing = forward.mix
    state_bytes = store.state_bytes if elastic is None else store.block_bytes
    costs = Costs(spec, state_bytes, store.token_bytes, args.tp_size, store.transitions, store.transition_bytes)
    index = SegmentIndex(store.blocks, costs, rivals=elastic)
    ahead, group = 0 if args.disable_overlap_schedule else 1, ranks.of_this_server()
    settling, leases = Settling(index, ahead, group), None if elastic is None else Leases(index, ahead)
    about = (ctx.model_config.model_path, str(runner.dtype), config.segment_dtype, config.segment_mode, args.tp_size)
    seams = Seams(config.seam_tokens, shapes.window[-1])
    composer = Composer(store, index, seams, repr(about), served, now, count, memory, settling, leases)
    if elastic is not None:
        elastic.share(composer)
    if config.segment_peers:
        composer.exchange = Exchange(composer, runner.model, group)
    return composer


def _shapes(
    runner: Any, states: Any, buffers: tuple[Tensor, Tensor], latent: bool, attention_layers: int, head_layers: int
) -> Shapes:
    """What an entry holds of each layer: SGLang's pool of states, and `buffers`, a layer's keys and values.

    `head_layers` are those of a head that drafts.
    """
    keys, values = buffers
    check_keys(str(keys.dtype))
    cache = states.mamba_pool.mamba_cache
    if len(cache.conv) != 1:
        raise ConfigError(f"segments need one convolution window a layer: {len(cache.conv)}")
    return Shapes(
        linear_layers=len(states.mamba_map),
        temporal=tuple(cache.temporal.shape[2:]),
        window=tuple(forward.windows(runner.attn_backend, cache.conv[0]).shape[2:]),
        window_dtype=cache.conv[0].dtype,
        dense=_FAMILIES[type(prefill_states.linear_backend(runner)).__name__],
        attention_layers=attention_layers,
        kv_heads=keys.shape[1],
        key_size=keys.shape[2],
        value_size=0 if latent else values.shape[2],
        kv_dtype=keys.dtype,
        head_layers=head_layers,
    )


def _frequencies(runner: Any, latent: bool, device: Any) -> tuple[Tensor, bool] | None:
    """Those of `rope.frequencies`, on `device`; raises ConfigError where latent attention would need them."""
    found = rope.frequencies(runner.model)
    if latent:
        check_latent(type(runner.attn_backend.full_attn_backend).__name__, found)
    return None if found is None else (found[0].to(device), found[1])


def _check_prefill(kind: str, args: Any) -> None:
    if kind not in _FAMILIES:
        raise ConfigError(
            "segments are served for gated delta rules, Kimi delta attention and Mamba-2; drop --hybrid-segments: "
            f"{kind}"
        )
    if prefill_states.is_one_graph(args):
        raise ConfigError(
            "segments change the shape of a prefill, which is one CUDA graph here; add --cuda-graph-backend-prefill "
            f"breakable or drop --hybrid-segments: {args.cuda_graph_config.prefill.backend}"
        )


def check_keys(dtype: str) -> None:
    """Raise ConfigError for keys of another type than the flag said: a quantized checkpoint may ask for scaled ones."""
    if dtype not in ("torch.bfloat16", "torch.float16", "torch.float32"):
        raise ConfigError(
            f"scaled keys cannot be turned; add --kv-cache-dtype bfloat16 or drop --hybrid-segments: {dtype}"
        )


def check_latent(backend: str, frequencies: object) -> None:
    """Raise ConfigError where latent attention by SGLang's `backend`, turned by `frequencies`, has no segments."""
    if frequencies is not None:
        raise ConfigError("segments are served with latent attention (MLA) without positions; drop --hybrid-segments")
    if backend not in _ABSORBED:
        raise ConfigError(
            "segments need latent attention absorbed in every prefill; add --attention-backend triton or drop "
            f"--hybrid-segments: {backend}"
        )
