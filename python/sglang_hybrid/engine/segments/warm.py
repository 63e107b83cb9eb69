"""Compiles and loads the kernels of composed passes when a server starts, and changes nothing.

The first composed pass of each kind would wait seconds for Triton otherwise, with everybody else's answers behind it;
and a kernel that is loaded while other ranks wait in a collective can hang. What is launched here skips: entries and
slots are -1. Later passes take the kernels made here, whatever their numbers of requests, tokens and segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.engine.cache.passes.convolution import SIZES
from sglang_hybrid.engine.segments import linear
from sglang_hybrid.engine.segments.attention import WIDEST, seen
from sglang_hybrid.engine.segments.draft import CHUNK, SHORT_CHUNK
from sglang_hybrid.engine.segments.operators import keep
from sglang_hybrid.engine.segments.store import Layer, Store

_LONG = 1 << 16
"""Tokens of a text that has several parts for `seam_attention`."""


def warm(
    store: Store,
    model: Any,
    kv: Any,
    layers: Sequence[int],
    temporal: Tensor,
    by_channel: bool,
    frequencies: Any,
    most: int,
) -> None:
    """For passes of SGLang's `model` over its pool `kv` of the attention `layers`, and a layer's states `temporal`.

    `by_channel`: these decay by channel. `frequencies` are those of `AttentionPass`; a pass runs `most` tokens.
    """
    pairs = [kv.get_kv_buffer(layer) for layer in layers]
    _moves(store, [key for key, _ in pairs], [value for _, value in pairs], frequencies)
    key_heads, mixers = set[int](), dict[str, Any]()
    for module in model.modules():
        kind = type(module).__name__
        if kind == "RadixAttention" and module.qk_head_dim == store.shapes.key_size <= WIDEST:  # not of latents
            _attention(module, *pairs[0])
        elif kind == "RadixLinearAttention":
            key_heads.add(module.num_v_heads if by_channel else module.num_k_heads)
            mixers["kimi" if by_channel else "delta"] = module
        elif kind == "MambaMixer2":
            key_heads.add(module.n_groups // module.tp_size)
            mixers["mamba2"] = module
    for heads in key_heads:
        _recurrence(store.layers[0], temporal, heads, store.shapes.dense, by_channel)
    for family, module in mixers.items():
        _convolutions(store, family, module, most)


def _moves(store: Store, keys: list[Tensor], values: list[Tensor], frequencies: Any) -> None:
    """Copies of interiors: of all layers before a pass, and of one in the middle of it."""
    from sglang_hybrid_kernels.rerotate_scatter import rerotate_scatter

    one = torch.ones(1, dtype=torch.int64, device=keys[0].device)
    turns, interleaved = frequencies or (one.double(), False)
    kept = store.kv
    values = values if kept.values else []
    for some in (slice(None), slice(1)):
        rerotate_scatter(
            kept.keys[some], keys[some], -one, -one, one, torch.cat([one - 1, one]), turns,
            source_v=kept.values[some], destination_v=values[some], interleaved=interleaved, check_slots=False,
        )  # fmt: skip


def _attention(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Attention of one token without a position, over short and long texts."""
    from sglang_hybrid_kernels.seam_attention import seam_attention

    one = torch.ones(1, dtype=torch.int64, device=keys.device)
    bounds, q = torch.cat([one - 1, one]), keys.new_zeros(1, layer.tp_q_head_num, layer.qk_head_dim)
    cold = keys.new_zeros(1, *keys.shape[1:]), values.new_zeros(1, *values.shape[1:])
    for pool in ((keys, values), cold):
        for longest in (1, _LONG):
            seam_attention(
                q, *pool, one - 1, bounds, -one, bounds, scale=layer.scaling, window=seen(layer), longest=longest,
                check_slots=False,
            )  # fmt: skip


def _convolutions(store: Store, family: str, module: Any, most: int) -> None:
    """Of one row, with as many windows as rows of `most` tokens may have, but for those with hardly any tokens."""
    shapes, device = store.shapes, store.buffer.device
    channels, before, behind = shapes.window[0], 0, 0
    if family == "mamba2":  # its channels stand among others of a projection
        before, behind = (n // module.tp_size for n in (module.intermediate_size, module.num_heads))
    convolve, largest = linear.convolution(family), next((size for size in SIZES if size >= most // 8), SIZES[-1])
    for size in SIZES[: SIZES.index(largest) + 1]:
        windows = torch.zeros(size, *shapes.window, dtype=shapes.window_dtype, device=device)
        for tokens in (16, 17):  # what 16 divides is compiled by itself
            whole = torch.zeros(
                tokens, before + channels + behind, dtype=linear.weights(module)[0].dtype, device=device
            )
            bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
            x = whole[:, before : before + channels]
            linear.convolved(convolve, module, x, windows, bounds, [tokens])


def _recurrence(layer: Layer, temporal: Tensor, key_heads: int, delta: bool, by_channel: bool) -> None:
    """A segment that is made and not kept, and a jump over nothing, from no state."""
    from sglang_hybrid_kernels.chunk_h_jump import chunk_h_jump
    from sglang_hybrid_kernels.chunk_transition import chunk_transition

    heads, size, key_size = temporal.shape[1:]

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=temporal.device)

    one = torch.ones(1, dtype=torch.int64, device=temporal.device)
    bounds = torch.cat([one - 1, one])
    k, v, g = zeros(1, key_heads, key_size), zeros(1, heads, size), zeros(1, heads, *[key_size] * by_channel)
    beta = zeros(1, heads) if delta else None
    end_state, transition = zeros(1, heads, size, key_size), zeros(1, heads, *[key_size, key_size] * delta)
    vanishing = torch.zeros(1, heads, dtype=torch.bool, device=temporal.device)
    chunk_transition(
        k, v, g, beta, bounds, -one, end_state, transition, vanishing=vanishing, delta=delta, check_slots=False
    )
    keep(end_state, one - 1, layer.end_state, layer.end_state_scale, -one)
    if delta:
        keep(transition.flatten(0, 1), one - 1, layer.transition, layer.transition_scale, -one)
    for chunk in (SHORT_CHUNK, CHUNK):
        chunk_h_jump(
            k, zeros(1, heads, key_size) if delta else None, v, g, temporal, -one, bounds, bounds, -one,
            layer.transition, layer.end_state, transition_scale=layer.transition_scale,
            end_state_scale=layer.end_state_scale, transition_rows=layer.transition_rows, chunk_size=chunk,
            check_slots=False,
        )  # fmt: skip
