"""The window of a causal convolution at any token of a prefill: the checkpoint beside the recurrent state."""

from __future__ import annotations

from torch import Tensor

from sglang_hybrid_kernels.conv_window_at import check, naive
from sglang_hybrid_kernels.dispatch import backend_for


def conv_window_at(
    x: Tensor,
    cu_seqlens: Tensor,
    sequence: Tensor,
    position: Tensor,
    into: Tensor,
    slots: Tensor,
    *,
    initial: Tensor | None = None,
    initial_slots: Tensor | None = None,
    check_slots: bool = True,
) -> None:
    """into[slots[n]] = the last inputs, oldest first, after the first position[n] tokens of sequence[n], for every n.

    x             [T, channels] packed inputs of the convolution (SGLang keeps [channels, T]: pass x.mT), any strides.
    cu_seqlens, sequence, position, slots: as in `state_at`, but positions of empty sequences are allowed.
    into          [slots, channels, width - 1] any float dtype, any strides.
    initial       [slots, channels, width - 1] windows before the sequences' first tokens, for positions below
                  width - 1; sequence i has initial_slots[i] [sequences], zeros if that is negative or nothing is given.
                  May be `into` itself if no destination is the initial slot of a sequence asked for.

    check_slots=False leaves out the tests that read indices, as in `state_at`. Raises ValueError for other bad input.
    """
    plan = check.Plan(x, cu_seqlens, sequence, position, into, slots, initial, initial_slots)
    plan.check(check_slots)
    if not position.numel() or not into.numel() or cu_seqlens.numel() < 2:
        return
    if backend_for(into) == "triton":
        from sglang_hybrid_kernels.conv_window_at import triton

        triton.conv_window_at(plan)
    else:
        naive.conv_window_at(plan)


__all__ = ["conv_window_at"]
