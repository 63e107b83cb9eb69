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

from sglang_hybrid_kernels.copy_slots import copy_slots
from sglang_hybrid_kernels.state_at import state_at


def warm_copy_slots(pools: Sequence[Tensor]) -> None:
    """Prepare copy_slots within these pools [layers, slots, ...] by int64 indices.

    Raises ValueError as copy_slots does, and what the compiler raises.
    """
    if not pools:
        return
    skip = torch.full((1,), -1, device=pools[0].device)
    copy_slots(pools, skip, skip, check_slots=False)


def warm_state_at(
    into: Tensor, *, key_heads: int, token_dtype: torch.dtype, by_channel: bool = False, l2norm: bool = False
) -> None:
    """Prepare state_at by the delta rule into the pool `into` [slots, heads, V, K]; l2norm as there.

    token_dtype is that of h, k and v; g and beta are float32, cu_seqlens int32 as SGLang's, other indices int64.
    by_channel: g decays each key channel. k, v, g and beta may be views of wider tensors as long as the same strides
    are multiples of 16 as are in dense ones. Raises ValueError as state_at does, and what the compiler raises.
    """
    _, heads, value_size, size = into.shape
    tokens = 2

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=into.device)

    one = zeros(torch.int64, 1)
    state_at(
        zeros(token_dtype, 1, heads, value_size, size),
        zeros(token_dtype, tokens, key_heads, size),
        zeros(token_dtype, tokens, heads, value_size),
        zeros(torch.float32, tokens, heads, *[size] * by_channel),
        zeros(torch.float32, tokens, heads),
        torch.tensor([0, tokens], dtype=torch.int32, device=into.device),
        one,
        one,
        into,
        one - 1,
        l2norm=l2norm,
        check_slots=False,
    )


__all__ = ["warm_copy_slots", "warm_state_at"]
