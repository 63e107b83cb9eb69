"""Attention of new tokens over a cached prefix, in PyTorch: as much work as there are new tokens.

SGLang's `torch_native` backend computes the attention of all rows of the sequence anew, the cached ones included, and
throws those away: a turn of a hundred tokens behind a prefix of five thousand costs as much as a prompt of 5,100.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_hybrid.engine.cpu.speculation.attention import verify

ROWS = 128
"""New tokens at a time: no row looks at keys behind its block, and a mask stays small."""
WORTH = 0.2
"""Share of the work that must be saved, for masks cost some: else the cached rows are computed too, as SGLang does."""


def extend(
    original: Any,
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Stands for `TorchNativeAttnBackend._run_sdpa_forward_extend`; anything but causal attention is left to it.

    query, output: [new tokens, heads, head size], requests one after the other; k_cache, v_cache: [slots, KV heads,
    head size]; req_to_token: [rows, context] slots; the others: [requests], of which `seq_lens` counts both prefix and
    new tokens. The rows of a verification are candidates instead (`speculation/attention.py`).
    """
    candidates = getattr(backend, "candidates", None)
    if candidates is not None:
        return verify(
            candidates, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scaling, enable_gqa
        )
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if not causal or is_cross_attn or windowed or encoder_lens is not None:
        return original(  # type: ignore[no-any-return]
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling=scaling, enable_gqa=enable_gqa, causal=causal,
            is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size,
        )  # fmt: skip
    begin = 0
    sizes = zip(req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, prefix, new in sizes:
        slots = req_to_token[row, : prefix + new]
        key, value = (cache[slots].to(query.dtype).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        _attend(output[begin : begin + new], query[begin : begin + new], key, value, scaling, enable_gqa)
        begin += new
    return output


def _attend(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    enable_gqa: bool,
) -> None:
    """Causal attention of one request's new tokens over all it has; the prefix's rows run too where that is cheap.

    query, output: [new, heads, head size]; key, value: [1, KV heads, prefix + new, head size].
    """
    new, rows = len(query), query.transpose(0, 1)[None]
    prefix = key.shape[2] - new
    if prefix**2 <= WORTH * new * (2 * prefix + new):
        padded = torch.nn.functional.pad(rows, (0, 0, prefix, 0))
        found = scaled_dot_product_attention(padded, key, value, is_causal=True, scale=scaling, enable_gqa=enable_gqa)
        output[:] = found[0, :, prefix:].transpose(0, 1)
        return
    for at in range(0, new, ROWS):
        end = min(at + ROWS, new)
        seen = prefix + end
        mask = torch.ones(end - at, seen, dtype=torch.bool).tril_(prefix + at)
        found = scaled_dot_product_attention(
            rows[:, :, at:end], key[:, :, :seen], value[:, :, :seen],
            attn_mask=mask, scale=scaling, enable_gqa=enable_gqa,
        )  # fmt: skip
        output[at:end] = found[0].transpose(0, 1)


def padded_length(_: Any) -> int:
    """Tokens of a row that pads a batch; Triton's backend on a GPU says the same."""
    return 1


def absorbed(_: Any, attention: Any, *__: Any) -> Any:
    """AFTER hook of the choice of a method for latent attention: new tokens see latents, as those of the prefix.

    SGLang's other methods give the backend keys and values of the new tokens beside the pool, where `extend` looks.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def rows(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    bounds: list[tuple[int, int, int, int]],
    scale: float,
) -> torch.Tensor:
    """Causal attention of rows of tokens at the ends of stretches of a text: [tokens, heads, V].

    query: [tokens, heads, head size]; the row (first, last, begin, end) are tokens [first, last), and the last of what
    lies in slots[begin:end]. Rows of one text follow upon each other; the longest stretch of each is gathered once.
    """
    output = query.new_empty(*query.shape[:2], v_cache.shape[-1])
    ends = {begin: max(end for _, _, other, end in bounds if other == begin) for _, _, begin, _ in bounds}
    held: tuple[int, torch.Tensor, torch.Tensor] | None = None
    for first, last, begin, end in bounds:
        if held is None or held[0] != begin:
            some = slots[begin : ends[begin]]
            held = (begin, *(cache[some].transpose(0, 1)[None] for cache in (k_cache, v_cache)))
        grouped = query.shape[1] != k_cache.shape[1]
        for at in range(first, last, ROWS):
            to = min(at + ROWS, last)
            seen = end - begin - (last - to)
            mask = torch.ones(to - at, seen, dtype=torch.bool, device=query.device).tril_(seen - (to - at))
            found = scaled_dot_product_attention(
                query[at:to].transpose(0, 1)[None], held[1][:, :, :seen], held[2][:, :, :seen],
                attn_mask=mask, scale=scale, enable_gqa=grouped,
            )  # fmt: skip
            output[at:to] = found[0].transpose(0, 1)
    return output
