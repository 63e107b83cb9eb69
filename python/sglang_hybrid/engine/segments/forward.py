"""The forward pass of a batch with composed prompts: a shorter stream of tokens, and layers that know its rows.

SGLang builds a ForwardBatch, plans its attention backends, and calls them layer by layer. The first is given the
shorter stream; the others run as ever for plain requests, over a ForwardBatch of these alone, and by `attention` and
`linear` for composed ones. A head that drafts runs over the same rows behind it (`heads`). Models, sampling and memory
stay SGLang's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.passes.prefill_states import is_by_channel
from sglang_hybrid.engine.segments.attention import AttentionPass
from sglang_hybrid.engine.segments.batch import PassBatch
from sglang_hybrid.engine.segments.composer import Composer
from sglang_hybrid.engine.segments.draft import build
from sglang_hybrid.engine.segments.linear import LinearPass, Pools
from sglang_hybrid.engine.segments.store import Planes


@dataclass(slots=True)
class Running:
    """The batch whose forward pass runs, or comes next; `plain` is the ForwardBatch of its plain requests, if any.

    `lengths` are those by which the pass knows the batch for its own: SGLang copies a ForwardBatch on the way.
    """

    composer: Composer
    batch: PassBatch
    slots: Tensor
    lengths: list[int]
    runner: Any
    attention: AttentionPass | None = None
    linear: LinearPass | None = None
    plain: Any = None
    backend: Any = None
    embeds: Any = None
    """Of a batch with images: the embeddings that the head's pass begins from."""

    def attention_pass(self, backend: Any, kept: Planes, layers: Sequence[int]) -> AttentionPass:
        """Composed attention of `layers`, which SGLang's `backend` runs for others; what was there before is copied."""
        table, frequencies = backend.req_to_token_pool.req_to_token, self.composer.served.frequencies
        made = AttentionPass(self.batch, kept, backend.token_to_kv_pool, layers, self.slots, table, frequencies)
        made.copy_early()
        return made


_running: Running | None = None


def running(forward_batch: Any) -> Running | None:
    """The composed batch that `forward_batch` is, None for another."""
    if _running is None or not forward_batch.forward_mode.is_extend_without_speculative():
        return None
    return _running if list(forward_batch.extend_seq_lens_cpu or ()) == _running.lengths else None


def last(batch: Any) -> Running | None:
    """The composed pass that ran last, if it was that of SGLang's `batch`: what a head drafts behind."""
    return _running if _running is not None and _running.slots is batch.out_cache_loc else None


def shorten(composer: Composer, original: Callable[..., Any], cls: Any, batch: Any, runner: Any, **kwargs: Any) -> Any:
    """ForwardBatch.init_new of a batch that may hold composed requests."""
    global _running
    if runner.is_draft_worker:
        now = last(batch)
        if now is None or not batch.forward_mode.is_extend_without_speculative():
            return original(cls, batch, runner, **kwargs)
        following = torch.cat([now.batch.extra[1:], now.batch.extra[:1]])  # as SGLang has turned the ids of the batch
        drafted = _short(now.batch, following, original, cls, batch, runner, kwargs)
        drafted.mm_input_embeds = now.embeds
        return drafted
    _running = None
    composed = composer.composed(batch) if batch.forward_mode.is_extend_without_speculative() else []
    if not composed:
        return original(cls, batch, runner, **kwargs)
    device = batch.out_cache_loc.device
    table = runner.req_to_token_pool.req_to_token
    window = composer.seams.window
    made = build(batch.prefix_lens, batch.extend_lens, composed, table.shape[1], window, device)
    _running = Running(composer, made, batch.out_cache_loc, made.lengths, runner)
    return _short(made, made.extra, original, cls, batch, runner, kwargs)


def _short(
    made: PassBatch,
    extra: Tensor,
    original: Callable[..., Any],
    cls: Any,
    batch: Any,
    runner: Any,
    kwargs: dict[str, Any],
) -> Any:
    """The ForwardBatch of the stream that `made` takes from that of `batch`, with the ids `extra` behind it."""
    short = copy.copy(batch)
    short.input_ids = torch.cat([batch.input_ids, extra.to(batch.input_ids.dtype)])[made.take]
    nowhere = batch.out_cache_loc.new_zeros(len(extra))  # SGLang's padding slot; what is run there is kept by us
    short.out_cache_loc = torch.cat([batch.out_cache_loc, nowhere])[made.take]
    short.extend_lens = made.lengths
    whole = zip(batch.prefix_lens, batch.extend_lens, made.lengths, strict=True)
    short.prefix_lens = [max(0, prefix + extend - run) for prefix, extend, run in whole]
    starts = zip(batch.extend_logprob_start_lens, batch.extend_lens, made.lengths, strict=True)
    short.extend_logprob_start_lens = [run - (extend - start) for start, extend, run in starts]
    short.extend_num_tokens = len(made.take)
    result = original(cls, short, runner, **kwargs)
    result.positions = made.positions.to(result.positions.dtype)
    if result.mrope_positions is not None:  # of text all three are the same
        tokens = made.linear.tokens
        result.mrope_positions[:, tokens] = made.positions[tokens].to(result.mrope_positions.dtype)
    return result


def plan(original: Callable[..., Any], backend: Any, forward_batch: Any) -> Any:
    """HybridLinearAttnBackend.init_forward_metadata: SGLang's for plain requests, ours for composed ones."""
    now = running(forward_batch)
    if now is None:
        return original(backend, forward_batch)
    batch, composer = now.batch, now.composer
    now.backend = backend
    if batch.plain_rows:
        now.plain = plain(forward_batch, batch, now.runner)
        original(backend, now.plain)
    now.attention = now.attention_pass(backend, composer.store.kv, composer.served.attention_layers)
    slots = None
    if batch.saves is not None:
        slots = torch.cat([checkpoint.slot.view(-1) for checkpoint in batch.saves.checkpoints]).long()
        for checkpoint in batch.saves.checkpoints:
            checkpoint.written = True
    now.linear = LinearPass(batch, slots, now.slots.device, composer.operators(batch.making))
    return None


def plain(forward_batch: Any, batch: PassBatch, runner: Any) -> Any:
    """`forward_batch` as if it had its plain requests only."""
    rows, there, tokens = torch.tensor(batch.plain_rows), batch.plain_at, batch.plain
    found = copy.copy(forward_batch)
    found.batch_size = len(batch.plain_rows)
    for name in _BY_REQUEST:
        values = getattr(forward_batch, name, None)
        if isinstance(values, Tensor):
            setattr(found, name, values[rows if values.device.type == "cpu" else there])
        elif isinstance(values, list):
            setattr(found, name, [values[row] for row in batch.plain_rows])
    for name in ("input_ids", "positions", "out_cache_loc"):
        setattr(found, name, getattr(forward_batch, name)[tokens])
    found.extend_num_tokens = len(tokens)
    found.seq_lens_sum = int(found.seq_lens_cpu.sum())
    found.extend_start_loc = torch.cumsum(found.extend_seq_lens, 0, dtype=torch.int32) - found.extend_seq_lens
    compat.plan_locations(found, runner)
    return found


_BY_REQUEST = (
    "req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "orig_seq_lens", "extend_seq_lens",
    "extend_seq_lens_cpu", "extend_prefix_lens", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu",
    "mamba_track_indices", "mamba_track_mask", "mamba_track_seqlens", "mamba_prefill_track_mask_cpu",
    "mamba_track_seqlens_cpu", "lora_ids", "rids",
)  # fmt: skip
"""Fields of a ForwardBatch with a value for each request, of those that attention backends read."""


def extend(
    original: Callable[..., Any],
    backend: Any,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    mixed_qkv: Any = None,
    a: Any = None,
    b: Any = None,
    **kwargs: Any,
) -> Any:
    """HybridLinearAttnBackend.forward_extend of one layer."""
    now = running(forward_batch)
    if now is None or now.linear is None or now.attention is None:
        return original(backend, layer, forward_batch, save_kv_cache, q, k, v, mixed_qkv, a, b, **kwargs)
    batch, number = now.batch, layer.layer_id
    tokens = batch.linear.tokens
    if number in backend.full_attn_layers:

        def run(*tensors: Any, **named: Any) -> Any:
            return original(backend, layer, now.plain, save_kv_cache, *tensors, **named)

        by_sglang = None if now.plain is None else run
        return attended(now.attention, by_sglang, layer, (q, k, v), save_kv_cache, kwargs)
    kept = now.composer.store.layers[now.composer.served.linear_layers[number]]
    by_channel = is_by_channel(backend.linear_attn_backend)
    family = now.linear.kimi if by_channel else now.linear.delta
    found = family(layer, kept, _pools(backend, number), mixed_qkv, a, b)
    out = mixed_qkv.new_zeros(1, mixed_qkv.shape[0], *found.shape[1:])
    out[0, tokens] = found
    if now.plain is not None:
        some = batch.plain
        kwargs.pop("linear_attn_output", None)
        gates = {name: x[:, some] if by_channel else x[some] for name, x in (("a", a), ("b", b))}
        parts = {"mixed_qkv": mixed_qkv[some], **gates}
        out[0, some] = original(backend, layer, now.plain, save_kv_cache, q, k, v, **parts, **kwargs)[0]
    return out


def attended(
    composed: AttentionPass,
    run_plain: Callable[..., Any] | None,
    layer: Any,
    qkv: tuple[Any, Any, Any],
    save_kv_cache: bool,
    kwargs: dict[str, Any],
) -> Any:
    """Attention of one layer, of composed requests and of plain ones, which `run_plain` runs."""
    q, k, v = qkv
    whole_q, whole_k = (_whole(x, kwargs.get(name)) for x, name in ((q, "q_rope"), (k, "k_rope")))
    if save_kv_cache:
        composed.keep(layer, whole_k, v)
    found = composed.run(layer, whole_q, whole_k, v)
    out = q.new_zeros(q.shape[0], found.shape[1])  # a graph's padding stays finite
    out[composed.batch.linear.tokens] = found
    if run_plain is not None:
        some = composed.batch.plain
        kwargs |= {name: kwargs[name][some] for name in ("q_rope", "k_rope") if kwargs.get(name) is not None}
        out[some] = run_plain(q[some], k[some], v[some], **kwargs)
    return out


def mix(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Mamba2AttnBackend.forward of one layer; `original` runs it for plain requests."""
    names = ("mixer", "hidden_states", "output", "layer_id", "forward_batch", "mup_vector", "use_triton_causal_conv")
    given = dict(zip(names, args, strict=False)) | kwargs
    now = running(given["forward_batch"])
    if now is None or now.linear is None:
        return original(backend, *args, **kwargs)
    hidden, number = given["hidden_states"], given["layer_id"]
    tokens, composer = now.batch.linear.tokens, now.composer
    kept = composer.store.layers[composer.served.linear_layers[number]]
    pools = _pools(backend, number)
    found = now.linear.mamba2(given["mixer"], kept, pools, hidden[tokens], given.get("mup_vector"))
    out = given.get("output")
    if out is None:
        out = hidden.new_zeros(hidden.shape[0], found.shape[1])
    out[tokens] = found
    if now.plain is not None:
        some = now.batch.plain
        rest = given | {"hidden_states": hidden[some], "output": None, "forward_batch": now.plain}
        out[some] = original(backend, **rest)
    return out


def _whole(x: Any, rope: Any) -> Any:
    """Queries or keys [tokens, heads, size] of latent attention, whose last numbers some backends are given apart."""
    return x if rope is None else torch.cat([x.reshape(*rope.shape[:2], -1), rope], -1)


def _pools(backend: Any, layer_id: int) -> Pools:
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer_id)
    return Pools(windows(backend, cache.conv[0]), cache.temporal)


def windows(backend: Any, pool: Tensor) -> Tensor:
    """Windows of SGLang's pool as [.., channels, tokens]; Kimi delta attention keeps them the other way round."""
    return pool.mT if is_by_channel(getattr(backend, "linear_attn_backend", None)) else pool
