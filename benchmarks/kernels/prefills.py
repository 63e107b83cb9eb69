"""Other people's prefills of one GDN layer: what state_at and chunk_transition are added to, or replace."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def fla_prefill(**inputs: Any) -> Tensor:
    """flash-linear-attention's chunked prefill of the case's tokens, from zero, with the final state."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    k, v, g, beta = (inputs[name].unsqueeze(0) for name in ("k", "v", "g", "beta"))
    repeat = v.shape[2] // k.shape[2]
    k = k.repeat_interleave(repeat, 2) if repeat > 1 else k
    _, state = chunk_gated_delta_rule(k, k, v, g, beta, output_final_state=True, cu_seqlens=inputs["cu_seqlens"])
    return state


def fla_two_prefills(**inputs: Any) -> Tensor:
    """The paper's way to a transition operator: two passes of that prefill."""
    fla_prefill(**inputs)
    return fla_prefill(**inputs)


def sglang_copy(**inputs: Any) -> tuple[Tensor, ...]:
    """SGLang's copy of a convolution and a temporal state through all layers, one launch."""
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import track_mamba_states_all_layers

    temporal, conv = inputs["pools"]
    source, destination = inputs["source"], inputs["destination"]
    mask = (source >= 0) & (destination >= 0)
    track_mamba_states_all_layers(conv, temporal, source, mask, destination, source.numel())
    return temporal, conv
