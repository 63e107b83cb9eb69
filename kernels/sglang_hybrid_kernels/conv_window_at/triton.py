"""Triton kernel of conv_window_at: one program per block of channels and position."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_hybrid_kernels.arguments import require_grid
from sglang_hybrid_kernels.conv_window_at.check import Plan

CHANNELS = 256


@triton.jit(do_not_specialize=["sequences", "into_slots", "initial_count"])
def window_kernel(
    x, cu_seqlens, sequence, position, into, slots, initial, initial_slots, sequences, into_slots, initial_count,
    channels, x_token, x_channel, into_slot, into_channel, into_tap, initial_slot, initial_channel, initial_tap,
    WINDOW: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """grid [channels / BLOCK, n]. TAPS is WINDOW rounded up to a power of two."""
    n = tl.program_id(1)
    slot = tl.load(slots + n).to(tl.int64)
    row = tl.load(sequence + n).to(tl.int64)
    at = tl.load(position + n).to(tl.int64)
    exists = (slot >= 0) & (slot < into_slots) & (row >= 0) & (row < sequences)
    row = tl.where(exists, row, 0)
    first = tl.load(cu_seqlens + row).to(tl.int64)
    exists = exists & (at >= 0) & (at <= tl.load(cu_seqlens + row + 1).to(tl.int64) - first)
    if exists:
        o_c = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        tap = tl.arange(0, TAPS)[None, :]
        token = at - WINDOW + tap  # of the sequence; negative ones came before it
        inside = (o_c < channels) & (tap < WINDOW)
        value = tl.load(x + (first + token) * x_token + o_c * x_channel, mask=inside & (token >= 0), other=0.0).to(
            into.dtype.element_ty
        )
        if HAS_INITIAL:
            start = tl.load(initial_slots + row).to(tl.int64)
            started = (start >= 0) & (start < initial_count)
            before = tl.load(
                initial + start * initial_slot + o_c * initial_channel + (token + WINDOW) * initial_tap,
                mask=inside & (token < 0) & started,
                other=0.0,
            ).to(into.dtype.element_ty)
            value = tl.where(token < 0, before, value)
        tl.store(into + slot * into_slot + o_c * into_channel + tap * into_tap, value, mask=inside)


def conv_window_at(plan: Plan) -> None:
    """See sglang_hybrid_kernels.conv_window_at."""
    channels, window = plan.into.shape[1:]
    require_grid("positions", plan.position.numel())
    initial, slots = plan.into if plan.initial is None else plan.initial, plan.slots.contiguous()
    window_kernel[(triton.cdiv(channels, CHANNELS), plan.position.numel())](
        plan.x, plan.cu_seqlens.contiguous(), plan.sequence.contiguous(), plan.position.contiguous(), plan.into,
        slots, initial, slots if plan.initial_slots is None else plan.initial_slots.contiguous(),
        plan.cu_seqlens.numel() - 1, plan.into.shape[0], initial.shape[0], channels,
        *plan.x.stride(), *plan.into.stride(), *initial.stride(),
        WINDOW=window, TAPS=triton.next_power_of_2(window), BLOCK=CHANNELS, HAS_INITIAL=plan.initial is not None,
        num_warps=4,
    )  # fmt: skip
