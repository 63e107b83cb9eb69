"""A segment's end-state and cumulative transition operator [S | T] in one pass, straight into a pool of entries."""

from __future__ import annotations

from torch import Tensor

from sglang_hybrid_kernels.chunk_transition import check, naive
from sglang_hybrid_kernels.copy_slots import copy_slots
from sglang_hybrid_kernels.dispatch import backend_for


def chunk_transition(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    cu_seqlens: Tensor,
    entries: Tensor,
    end_state: Tensor,
    transition: Tensor | None = None,
    *,
    end_state_scale: Tensor | None = None,
    transition_scale: Tensor | None = None,
    vanishing: Tensor | None = None,
    vanishing_below: float = 1e-6,
    initial: Tensor | None = None,
    initial_slots: Tensor | None = None,
    delta: bool = True,
    l2norm: bool = False,
    check_slots: bool = True,
) -> None:
    """Write the operators of packed segment i into pool entry entries[i]: after it, a state S has become T S + S_C.

    k, v, g, beta, delta, l2norm: the tokens, as in `state_at`. cu_seqlens [segments + 1]; an empty segment is the
    identity. entries [segments]; a negative one is skipped, none may be named twice.
    end_state     [entries, heads, V, K] float or int8: S_C, the state from a zero start (or from `initial`).
    transition    T_C; None if it is not wanted. Its dimensions must fit the family:
                  dense (delta rule)              [entries, heads, K, K] float or int8, stored transposed,
                                                  [..., j, i] = T[i, j], so that S <- S @ transition + end_state;
                  diagonal (additive, g per channel)  [entries, heads, K] float;
                  scalar (additive, g per head)       [entries, heads] float.
    *_scale       [entries, heads, K] float, given exactly for int8 storage: value = int8 * scale of its last axis.
    vanishing     [entries, heads] bool: set where no element of T is larger than vanishing_below. The head forgets what
                  came before the segment; its T need not be read.
    initial       [slots, heads, V, K] and initial_slots [segments]: start from these states instead of zero (a negative
                  slot is zero). T does not depend on it. May not be end_state.

    State and operator stay in float32 registers for the whole segment; matrix products take k's dtype if it has 16 bits
    (as the stock kernels do), else float32. float64 inputs make the naive path compute in float64.

    Bits: a segment's result depends on its own tokens and start only, not on the batch. Cutting a text at a multiple of
    64 tokens and continuing from the end_state gives the bits of the uncut run, if end_state is float32 (float64 in a
    float64 naive run): that is, hit and cold run agree on the chunk grid. bfloat16 or int8 entries, or a cut elsewhere,
    round differently.

    check_slots=False leaves out the tests that read cu_seqlens, entries and initial_slots. Raises ValueError.
    Source: HYPIC; the chunk form is Yang et al. 2024 (arXiv 2412.06464) section 3.3 with K more value columns.
    """
    plan = check.Plan(
        k, v, g, beta, cu_seqlens, entries, end_state, transition, vanishing, vanishing_below, initial, initial_slots,
        delta, l2norm,
    )  # fmt: skip
    plan.check({"end_state": end_state_scale, "transition": transition_scale}, check_slots)
    if not entries.numel() or not end_state.numel():
        return
    wide = plan.widened()
    if backend_for(k) == "triton":
        from sglang_hybrid_kernels.chunk_transition import triton

        triton.chunk_transition(wide)
    else:
        naive.chunk_transition(wide)
    for scale, stored, computed in (
        (end_state_scale, end_state, wide.end_state),
        (transition_scale, transition, wide.transition),
    ):
        if scale is not None and stored is not None and computed is not None:
            copy_slots(
                [computed], entries, entries, into=[stored], into_scales=[scale.unsqueeze(-2)], slot_dim=0,
                check_slots=False,
            )  # fmt: skip


__all__ = ["chunk_transition"]
