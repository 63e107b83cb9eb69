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

    State and operator stay in float32 registers; matrix products take k's dtype if it has 16 bits (as stock kernels
    do), else float32. float64 inputs make the naive path compute in float64.

    Bits: a segment's result depends on its own tokens and start, not on the batch. A text cut at multiples of 64 tokens
    and continued from float32 end_states has the bits of the uncut run: hit and cold run agree on the chunk grid.
    Entries of fewer bits, or a cut elsewhere, round differently.

    check_slots=False leaves out the tests that read cu_seqlens, entries and initial_slots. Raises ValueError.
    Source: HYPIC; the chunk form is Yang et al. 2024 (arXiv 2412.06464) section 3.3 with K more value columns.
    """
    plan = check.Plan(
        k, v, g, beta, cu_seqlens, entries, end_state, transition, vanishing, vanishing_below, initial, initial_slots,
        delta, l2norm,
    )  # fmt: skip
    plan.check({"end_state": end_state_scale, "transition": transition_scale}, check_slots)
    if entries.numel() and end_state.numel():
        wide = plan.widened()
        _run(wide)
        _quantise(entries, wide.end_state, end_state, end_state_scale)
        _quantise(entries, wide.transition, transition, transition_scale)


def _run(plan: check.Plan) -> None:
    if backend_for(plan.k) == "triton":
        from sglang_hybrid_kernels.chunk_transition import triton

        triton.chunk_transition(plan)
    else:
        naive.chunk_transition(plan)


def _quantise(entries: Tensor, computed: Tensor | None, stored: Tensor | None, scale: Tensor | None) -> None:
    """Eight-bit entries from floating ones, where a scale is given."""
    if computed is not None and stored is not None and scale is not None:
        into = {"into": [stored], "into_scales": [scale.unsqueeze(-2)]}
        copy_slots([computed], entries, entries, **into, slot_dim=0, check_slots=False)


__all__ = ["chunk_transition"]
