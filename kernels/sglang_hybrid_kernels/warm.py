"""Compiles and loads the kernels of copy_slots and state_at before they are needed, and changes nothing.

A Triton kernel is compiled at its first launch, which takes seconds, and its code is loaded then, which may wait for
running kernels; with several GPUs that wait for each other in a collective this can last for ever. So a server calls
these functions at its start, once for each layout of its pools. Both launch with slots that are negative, "skip": the
kernels run, read the indices and write nothing. Later calls take the kernels made here, whatever their numbers of
pairs, positions, tokens and slots, and wherever their index tensors lie. On the naive path nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_hybrid_kernels.chunk import CHUNK
from sglang_hybrid_kernels.copy_slots import copy_slots
from sglang_hybrid_kernels.state_at import state_at


def warm_copy_slots(
    pools: Sequence[Tensor],
    *,
    into: Sequence[Tensor] | None = None,
    scales: Sequence[Tensor | None] | None = None,
    into_scales: Sequence[Tensor | None] | None = None,
    slot_dim: int = 1,
    index_dtype: torch.dtype = torch.int64,
) -> None:
    """Prepare copy_slots of these pools, `pools` to `slot_dim` as there, for source and destination of index_dtype.

    Raises ValueError as copy_slots does, and what the compiler raises.
    """
    if not pools:
        return
    skip = torch.full((1,), -1, dtype=index_dtype, device=pools[0].device)
    others = {"into": into, "scales": scales, "into_scales": into_scales}
    copy_slots(pools, skip, skip, **others, slot_dim=slot_dim, check_slots=False)


def warm_state_at(
    into: Tensor,
    *,
    key_heads: int,
    token_dtype: torch.dtype,
    state_dtype: torch.dtype | None = None,
    decay_dtype: torch.dtype = torch.float32,
    strength_dtype: torch.dtype | None = torch.float32,
    by_channel: bool = False,
    delta: bool = True,
    l2norm: bool = False,
    chunk: int = CHUNK,
    bounds_dtype: torch.dtype = torch.int32,
    index_dtype: torch.dtype = torch.int64,
) -> None:
    """Prepare state_at into the pool `into` [slots, heads, V, K]; delta, l2norm and chunk as there.

    token_dtype is that of k and v, state_dtype of h (default: as the tokens), decay_dtype of g, strength_dtype of beta
    (None: no beta), bounds_dtype of cu_seqlens (SGLang's are int32), index_dtype of sequence, position and slots.
    by_channel: g decays each key channel. k, v, g and beta may be views of wider tensors as long as the same strides
    are multiples of 16 as are in dense ones. Raises ValueError as state_at does, and what the compiler raises.
    """
    _, heads, value_size, size = into.shape
    tokens = 2

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=into.device)

    one = zeros(index_dtype, 1)
    state_at(
        zeros(token_dtype if state_dtype is None else state_dtype, 1, heads, value_size, size),
        zeros(token_dtype, tokens, key_heads, size),
        zeros(token_dtype, tokens, heads, value_size),
        zeros(decay_dtype, tokens, heads, *[size] * by_channel),
        None if strength_dtype is None else zeros(strength_dtype, tokens, heads),
        torch.tensor([0, tokens], dtype=bounds_dtype, device=into.device),
        one,
        one,
        into,
        one - 1,
        delta=delta,
        l2norm=l2norm,
        chunk=chunk,
        check_slots=False,
    )


__all__ = ["warm_copy_slots", "warm_state_at"]
