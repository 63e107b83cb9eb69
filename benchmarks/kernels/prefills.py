"""Other people's prefills of one layer: what state_at and chunk_transition are added to, or replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


def sglang_prefill(**inputs: Any) -> Callable[[], Tensor]:
    """SGLang's chunked prefill of gated delta rules, as its server runs it: from a pool of states, back into it."""
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

    k, v, g, beta = (inputs[name].unsqueeze(0) for name in ("k", "v", "g", "beta"))
    bounds = inputs["cu_seqlens"].int()
    pool = torch.zeros(bounds.numel() - 1, v.shape[2], v.shape[3], k.shape[3], device=v.device)
    slots = torch.arange(pool.shape[0], dtype=torch.int32, device=v.device)

    def call() -> Tensor:
        chunk_gated_delta_rule(k, k, v, g, beta, initial_state=pool, initial_state_indices=slots, cu_seqlens=bounds)
        return pool

    return call


def mamba2_prefill(tracked: bool) -> Callable[..., Callable[[], Tensor]]:
    """SGLang's Mamba-2 prefill; `tracked`: which also computes the states at the case's positions."""

    def prepare(**inputs: Any) -> Callable[[], Tensor]:
        from sglang.kernels.ops.mamba.triton_ops.ssd_combined import mamba_chunk_scan_combined

        x, dt, b = (inputs[name].unsqueeze(0).contiguous() for name in ("v", "beta", "k"))
        decay = torch.full((x.shape[2],), -1.0, device=x.device)
        bounds = inputs["cu_seqlens"].int()
        of_token = torch.arange(x.shape[1], device=x.device)
        places = {"cu_seqlens": bounds, "out": torch.empty_like(x)}
        places["seq_idx"] = torch.bucketize(of_token, inputs["cu_seqlens"][1:], right=True).int()[None]
        if tracked:
            ends = inputs["cu_seqlens"][inputs["sequence"]] + inputs["position"]
            places |= {"return_track_states": True, "track_seq_idx": inputs["sequence"], "track_end_locs": ends}

        def call() -> Tensor:
            made = mamba_chunk_scan_combined(x, dt, decay, b, b, 64, return_varlen_states=True, **places)
            return made[-1] if tracked else made

        return call

    return prepare


def mamba_ssm_prefill(**inputs: Any) -> Callable[[], Tensor]:
    """The Mamba-2 prefill of mamba-ssm, from zero, with the final state; chunks of 64 as here."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, b = (inputs[name].unsqueeze(0).contiguous() for name in ("v", "beta", "k"))
    decay = torch.full((x.shape[2],), -1.0, device=x.device)
    return lambda: mamba_chunk_scan_combined(x, dt, decay, b, b, 64, return_final_states=True)[1]


def causal_conv1d_prefill(**inputs: Any) -> Callable[[], Tensor]:
    """The convolution of a whole prompt by causal-conv1d, with its last window."""
    from causal_conv1d import causal_conv1d_fn

    x = inputs["x"].unsqueeze(0).transpose(1, 2)  # [1, channels, tokens], channels last in memory
    weight = torch.ones(x.shape[1], inputs["into"].shape[-1] + 1, dtype=x.dtype, device=x.device)
    return lambda: causal_conv1d_fn(x, weight, activation="silu", return_final_states=True)[1]
