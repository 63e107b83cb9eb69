"""The chunked state recurrence over a request's virtual rows, with cached segments jumped over between them."""

from __future__ import annotations

from torch import Tensor

from sglang_hybrid_kernels.chunk_h_jump import naive
from sglang_hybrid_kernels.chunk_h_jump.check import Plan
from sglang_hybrid_kernels.compose.check import Operators
from sglang_hybrid_kernels.dispatch import backend_for


def chunk_h_jump(
    k: Tensor,
    w: Tensor | None,
    u: Tensor,
    g: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    request_rows: Tensor,
    jump: Tensor,
    transition: Tensor,
    end_state: Tensor,
    *,
    transition_scale: Tensor | None = None,
    end_state_scale: Tensor | None = None,
    transition_rows: Tensor | None = None,
    chunk_size: int = 64,
    check_slots: bool = True,
) -> tuple[Tensor, Tensor]:
    """(h, v_new): the state before every chunk and the corrected values, for a layer's output stage; updates `state`.

    A request is a list of virtual rows: the tokens that are really run (seams, the query), in the order of the text.
    The state enters from state[slots[request]], goes through the rows in fp32 registers and returns to the same slot.
    Before row j it jumps over the cached segment jump[j]:  S <- T S + S_C.  Then, for each chunk c of the row, with b
    the cumulative log decay inside the chunk and e its value at the chunk's last token:
        h[c] = S        v_new = u - w S^T        S <- exp(e) S + sum over t of exp(e - b_t) v_new_t k_t^T

    k            [tokens, key_heads, K]; key head of head i: i // (heads / key_heads). Mamba2: B of each group.
    w            [tokens, heads, K] of the WY form, or None without the delta rule (Mamba2, GLA, lightning): v_new is u.
    u            [tokens, heads, V] of the WY form; without the delta rule the values (Mamba2: dt * x).
    g            [tokens, heads] cumulative natural log decay, from the start of each chunk; or, per channel (KDA, GLA),
                 [tokens, heads, K], and then k is [tokens, heads, K] and already multiplied by exp(e - b), as SGLang's
                 and FLA's stage before this one leave it.
    state        [slots, heads, V, K] fp32, bf16 or fp16.
    slots        [requests], no slot twice; -1 starts from zero and keeps nothing.
    cu_seqlens   [rows + 1] virtual row j holds tokens cu_seqlens[j] to cu_seqlens[j + 1]; rows may be empty.
    request_rows [requests + 1] request r owns rows request_rows[r] to request_rows[r + 1].
    jump         [rows] segment entry to jump over before the row, -1 for none.
    transition, end_state, their scales and transition_rows: segment entries as for `compose`, without the leading
                 layers: with transition_rows [entries, heads], transition is [rows, K, K] as there.

    h is [chunks, heads, V, K] in k's dtype: every row has ceil(length / chunk_size) chunks, row after row. v_new has
    the shape and dtype of u. check_slots=False leaves out the checks that read index tensors, which on a GPU wait for
    the device; h then has the most chunks there could be, tokens // chunk_size + rows, the last ones undefined. Raises
    ValueError for bad input, before anything is written. Triton copies k, w, u and g where they are strided.

    A request's bits do not depend on what else is in the batch. Nor do they depend on where a prefix was cut, if it was
    cut at a multiple of chunk_size from the row's start and the state was kept in fp32: one row over [0, n), two rows
    over [0, c) and [c, n), and two calls with the state stored in between give the same bits. Any other cut changes the
    order of sums.
    Source: HYPIC, seam recomputation; Gated DeltaNet, chunked WY form.
    """
    operators = Operators(transition, end_state, transition_scale, end_state_scale, transition_rows)
    plan = Plan(k, w, u, g, state, slots, cu_seqlens, request_rows, jump, operators, chunk_size)
    chunks = plan.check(check_slots)
    if backend_for(state) == "triton":
        from sglang_hybrid_kernels.chunk_h_jump import triton

        return triton.chunk_h_jump(plan, chunks)
    return naive.chunk_h_jump(plan, chunks)


__all__ = ["chunk_h_jump"]
