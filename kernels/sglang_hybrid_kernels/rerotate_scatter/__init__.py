"""Cached keys moved to new positions: rotated on by a delta and scattered, their values copied beside them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sglang_hybrid_kernels.dispatch import backend_for
from sglang_hybrid_kernels.rerotate_scatter import naive
from sglang_hybrid_kernels.rerotate_scatter.check import Plan


def rerotate_scatter(
    source_k: Sequence[Tensor],
    destination_k: Sequence[Tensor],
    source: Tensor,
    destination: Tensor,
    delta: Tensor,
    segment_offsets: Tensor,
    inverse_frequencies: Tensor,
    *,
    source_v: Sequence[Tensor] = (),
    destination_v: Sequence[Tensor] = (),
    interleaved: bool = False,
    check_slots: bool = True,
) -> None:
    """destination_k[l][destination[t]] = R(delta of t's segment) source_k[l][source[t]], and v copied, for all l and t.

    Keys rotated at positions p become the keys at positions p + delta, so a segment that was prefilled at one place in
    a text serves at any other. Rotating once more costs one more rounding of the rotary dimensions; everything else,
    and with delta 0 all, arrives unchanged. A scale that the rotary embedding puts on keys (YaRN) is in them already.

    source_k         one tensor [slots, heads, D] per layer, all of one shape, strides and dtype (fp32, bf16, fp16; fp64
                     naive only). A pool [layers, slots, heads, D] serves as it is.
    destination_k    as many, with the same heads, D and dtype. May be source_k.
    source_v, destination_v   as many [slots, heads, Dv] of any one dtype, or none.
    source, destination       [tokens] slots; a pair with a negative slot is skipped. No slot is written twice, and none
                     that another token reads.
    delta            [segments] integer position deltas, of either sign.
    segment_offsets  [segments + 1] segment i owns tokens segment_offsets[i] to segment_offsets[i + 1].
    inverse_frequencies   [rotary_dim / 2] radians per position, as the model's rotary embedding has them (a plain one
                     base ** (-2 i / rotary_dim)); static scaling only. Dimensions from rotary_dim to D do not turn.
    interleaved      False pairs dimension i with i + rotary_dim / 2 (GPT-NeoX), True pairs 2 i with 2 i + 1 (GPT-J).

    Angles are formed in float64: delta * frequency may be many turns.

    The same rotation moves the states of linear layers with scalar decay whose keys are rotated (lightning attention):
    S_C at position a becomes R(delta) S_C. A state pool [slots, heads, V, K] is passed as keys of D = K with heads * V
    heads: pool.flatten(1, 2), its slots as tokens. (Per-channel decay does not commute with a rotation.)

    check_slots=False leaves out the checks that read index tensors, which on a GPU wait for the device; their values
    are then trusted. Raises ValueError for bad input, before anything is written.
    Source: HYPIC, re-rotation of cached keys; RoFormer, R(a + b) = R(a) R(b).
    """
    plan = Plan(
        tuple(source_k), tuple(destination_k), tuple(source_v), tuple(destination_v),
        source, destination, delta, segment_offsets, inverse_frequencies, interleaved,
    )  # fmt: skip
    plan.check(check_slots)
    if not source.numel():
        return
    if backend_for(source) == "triton":
        from sglang_hybrid_kernels.rerotate_scatter import triton

        triton.rerotate_scatter(plan)
    else:
        naive.rerotate_scatter(plan)


__all__ = ["rerotate_scatter"]
