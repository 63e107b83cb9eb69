"""Checkpoint scatter of the extra_buffer strategy: copies live states into the slots the radix cache keeps."""

from __future__ import annotations

from torch import Tensor


def track_states(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy each masked row's state of one layer from slot cache_indices[row] to slot mamba_track_indices[row].

    conv_states and ssm_states are pools [slots, ...]. With check_freed_slots a row with a negative slot is left out.
    """
    pairs = _pairs(cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots)
    if pairs:
        sources, destinations = map(list, zip(*pairs, strict=True))
        for pool in (conv_states, ssm_states):
            pool[destinations] = pool[sources]


def track_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same for all layers at once: pools [layers, slots, ...]."""
    pairs = _pairs(cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots)
    if pairs:
        sources, destinations = map(list, zip(*pairs, strict=True))
        for pool in (conv_states_pool, ssm_states_pool):
            pool[:, destinations] = pool[:, sources]


def _pairs(
    cache_indices: Tensor, mask: Tensor, track_indices: Tensor, batch_size: int, check_freed: bool
) -> list[tuple[int, int]]:
    masked = mask[:batch_size].tolist()
    if not any(masked):  # most decode steps cross no boundary
        return []
    sources, destinations = cache_indices[:batch_size].tolist(), track_indices[:batch_size].tolist()
    pairs = [pair for row, pair in enumerate(zip(sources, destinations, strict=True)) if masked[row]]
    return [pair for pair in pairs if min(pair) >= 0] if check_freed else pairs
