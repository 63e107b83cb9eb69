"""Kimi delta attention (arXiv 2510.26692, section 3): a gated delta rule that forgets by channel.

SGLang's own functions are Triton kernels; these stand for them, over the chunks and steps of `gdn.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_hybrid.engine.cpu import gdn
from sglang_hybrid.engine.cpu.varlen import CHUNK
from sglang_hybrid_kernels.gates import log_decay


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    beta_is_raw: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Kimi delta attention over packed sequences.

    q, k [1, T, H, K]; v [1, T, H, V]; g [1, T, H, K] is the raw gate if `A_log` [.., H, ..] is given, else the log
    decay; beta [1, T, H], before the sigmoid if `beta_is_raw`. Final states are written to `initial_state`
    [slots, H, V, K]. Returns the output [1, T, H, V], with `output_intermediate_states` also the state at the start
    of every chunk, [1, chunks, H, V, K] float32. `track_state` [sequences, H, V, K] receives that of chunk
    `track_chunk_idx` [sequences] of each sequence; a negative one leaves its row alone.
    """
    if initial_state is None or cu_seqlens is None:
        raise NotImplementedError("on a CPU Kimi delta attention runs over a pool of states and packed sequences")
    if A_log is not None:
        g = log_decay(g, A_log, dt_bias, lower_bound)
    if beta_is_raw:
        beta = beta.float().sigmoid()
    norm = use_qk_l2norm_in_kernel
    out, h = gdn.chunked(q, k, v, g, beta, initial_state, cu_seqlens, norm, initial_state_indices, scale)
    if h is not None and track_state is not None and track_chunk_idx is not None:
        chunks = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
        first = chunks.cumsum(0) - chunks
        rows = (track_chunk_idx >= 0).nonzero().squeeze(-1)
        track_state[rows] = h[0, first[rows] + track_chunk_idx[rows]].to(track_state.dtype)
    return (out, h) if output_intermediate_states else out


def recurrent_kda(cache_ring: bool = False, **inputs: Any) -> Tensor:
    """One token for each row, or candidates of a verification: `gdn.recurrent_gated_delta_rule` with `is_kda`."""
    if cache_ring:
        raise NotImplementedError(
            "on a CPU candidates leave their states in a buffer; drop --enable-linear-replayssm-spec"
        )
    rings = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
    return gdn.recurrent_gated_delta_rule(**{name: value for name, value in inputs.items() if name not in rings})
