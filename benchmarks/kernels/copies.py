"""Other people's copies of states between slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def gather_scatter(**inputs: Any) -> tuple[Tensor, ...]:
    """What SGLang's MambaPool.copy_from does for the temporal state: through a temporary of all pairs."""
    for pool in inputs["pools"]:
        pool[:, inputs["destination"]] = pool[:, inputs["source"]]
    return tuple(inputs["pools"])


def slot_by_slot(**inputs: Any) -> Callable[[], tuple[Tensor, ...]]:
    """PyTorch's copy, pair by pair; the slots are known on the host."""
    pools, pairs = inputs["pools"], list(zip(inputs["source"].tolist(), inputs["destination"].tolist(), strict=True))

    def call() -> tuple[Tensor, ...]:
        for read, write in pairs:
            for pool in pools:
                pool[:, write].copy_(pool[:, read])
        return tuple(pools)

    return call


def sglang_tracking(**inputs: Any) -> tuple[Tensor, ...]:
    """SGLang's copy of a convolution and a temporal state through all layers, one launch."""
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import track_mamba_states_all_layers

    temporal, conv = inputs["pools"]
    source, destination = inputs["source"], inputs["destination"]
    mask = (source >= 0) & (destination >= 0)
    track_mamba_states_all_layers(conv, temporal, source, mask, destination, source.numel())
    return temporal, conv


def sglang_copy_on_match(**inputs: Any) -> Callable[[], tuple[Tensor, ...]]:
    """SGLang's MambaPool.copy_from where it fuses: one launch for the windows, gather and scatter for the states."""
    from sglang.srt.mem_cache.mamba_slot_fused import build_conv_slot_descriptor, fused_copy_conv_slots

    temporal, conv = inputs["pools"]
    source, destination = inputs["source"], inputs["destination"]
    windows = build_conv_slot_descriptor([conv])

    def call() -> tuple[Tensor, ...]:
        fused_copy_conv_slots(windows, source, destination)
        temporal[:, destination] = temporal[:, source]
        return temporal, conv

    return call
