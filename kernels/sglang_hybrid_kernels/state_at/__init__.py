"""The exact recurrent state at any token of a prefill, rolled forward from the start of the token's chunk."""

from __future__ import annotations

from torch import Tensor

from sglang_hybrid_kernels.chunk import CHUNK
from sglang_hybrid_kernels.dispatch import backend_for
from sglang_hybrid_kernels.state_at import check, naive


def state_at(
    h: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    cu_seqlens: Tensor,
    sequence: Tensor,
    position: Tensor,
    into: Tensor,
    slots: Tensor,
    *,
    delta: bool = True,
    l2norm: bool = False,
    chunk: int = CHUNK,
    check_slots: bool = True,
) -> None:
    """into[slots[n]] = the state after the first position[n] tokens of sequence[n], for every n.

    h             [chunks, heads, V, K] state at the start of every chunk, sequence by sequence, each cut every `chunk`
                  tokens from its own first token: what SGLang's and FLA's chunked prefills return.
    k             [T, key heads, K], packed; value head i reads key head i // (heads / key heads).
    v             [T, heads, V].
    g             [T, heads] or [T, heads, K] log decay of each token (natural, not summed).
    beta          [T, heads] write strength, or None for 1.
    cu_seqlens    [sequences + 1] bounds of the packed sequences; a sequence may be empty.
    sequence      [n] which sequence; several positions of one sequence are as good as one.
    position      [n] tokens of it, 0 to its length; 0 of an empty sequence has no chunk and is refused.
    into, slots   [slots, heads, V, K] any float dtype, [n]; a negative slot is skipped, no slot may be named twice.
    delta         True: value = beta (v - S k) (GDN, KDA). False: value = beta v, which also serves
                  - Mamba2: k = B, v = x, beta = dt, g = dt A, V head_dim, K state size, key heads groups;
                  - the delta rule whose solved values (FLA's v_new) are at hand: v = v_new, beta = None. One matrix
                    product instead of a walk over the chunk's tokens.
    l2norm        scale every key to unit length first, as SGLang's use_qk_l2norm_in_kernel does.

    On a chunk's start the result is h, bit for bit (rounded to into's dtype). Elsewhere it is as exact as h, computed
    in float32 (float64 on the naive path if an input is). The reduction order depends on the position inside its chunk
    and on nothing else: not on the batch, not on where the sequence was cut before. The state that a sequence started
    from is part of h, so one that continues a cached prefix needs nothing more.

    check_slots=False leaves out the tests that read cu_seqlens, sequence, position and slots, which on a GPU wait for
    the device; what does not exist is then skipped. Raises ValueError for other bad input, before anything is written.
    Source: Marconi section 4.1 ("roll the state forward").
    """
    plan = check.Plan(h, k, v, g, beta, cu_seqlens, sequence, position, into, slots, delta, l2norm, chunk)
    plan.check(check_slots)
    if not position.numel() or not into.numel() or cu_seqlens.numel() < 2:
        return
    if backend_for(into) == "triton":
        from sglang_hybrid_kernels.state_at import triton

        triton.state_at(plan)
    else:
        naive.state_at(plan)


__all__ = ["state_at"]
