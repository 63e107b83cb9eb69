"""Copies slots of any number of pools: a state with all its layers and convolution windows in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sglang_hybrid_kernels.copy_slots import check, naive
from sglang_hybrid_kernels.dispatch import backend_for


def copy_slots(
    pools: Sequence[Tensor],
    source: Tensor,
    destination: Tensor,
    *,
    into: Sequence[Tensor] | None = None,
    scales: Sequence[Tensor | None] | None = None,
    into_scales: Sequence[Tensor | None] | None = None,
    slot_dim: int = 1,
    check_slots: bool = True,
) -> None:
    """into[i][:, destination[n]] = pools[i][:, source[n]] for every pool i and, in this order, every pair n.

    pools: tensors [layers, slots, ...] (slot_dim=1, SGLang's pools) or [slots, ...] (slot_dim=0), any strides, dtypes
    may differ. into: as many destination pools, default the pools themselves; each has its pool's shape but for the
    number of slots, and may have another floating dtype (rounded to nearest even). Pools and destinations either are
    the same tensor or share no memory.
    source, destination: int64 or int32 [pairs]; a pair with a negative slot is skipped. The pairs are applied in order,
    as a loop would: a slot may be written twice (the last pair wins), and a pair may read what an earlier one wrote.

    Eight bits: a pool of int8 values has scales where `scales` (of pools) or `into_scales` (of into) names a tensor of
    its shape with size 1 in the second last dimension: value = int8 * scale. Copying from a floating pool to such a
    pool sets scale = max(|column|, 1e-8) / 127 over the second last dimension (V of a [V, K] state: one scale per key
    channel, as SGLang's int8 checkpoint store has), rounded to the scale's dtype, divides by it and rounds half to
    even. An exact zero stays zero, NaN becomes 0. From int8 to int8 with scales, both are copied as they are.

    check_slots=False leaves out the test that slots exist, which on a GPU waits for the device; pairs with a slot out
    of range are then skipped. Raises ValueError for other bad input, before anything is written.
    """
    into = pools if into is None else into
    empty: list[Tensor | None] = [None] * len(pools)
    scales = empty if scales is None else scales
    into_scales = empty if into_scales is None else into_scales
    check.arguments(pools, source, destination, into, scales, into_scales, slot_dim, check_slots)
    plain, quantised = check.split(pools, into, scales, into_scales)
    if not source.numel() or not pools:
        return
    if backend_for(pools[0]) == "triton":
        from sglang_hybrid_kernels.copy_slots import triton

        triton.copy_slots(plain, quantised, source, destination, slot_dim)
    else:
        naive.copy_slots(plain, quantised, source, destination, slot_dim)


__all__ = ["copy_slots"]
