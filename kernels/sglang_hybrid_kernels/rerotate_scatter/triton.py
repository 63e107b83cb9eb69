"""Triton kernel of rerotate_scatter: every element of K and V is read once and written once, in one launch.

Layers are separate tensors in SGLang; the kernel finds them as distances from the first one, in a small table.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_hybrid_kernels.arguments import require, require_grid
from sglang_hybrid_kernels.rerotate_scatter.check import Plan

BLOCK_ELEMENTS = 4096
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["source", "destination", "segment"])
def rerotate_scatter_kernel(
    source_k, destination_k, source_v, destination_v, layers, source, destination, segment, cos, sin, rows, heads,
    sk_slot, sk_head, dk_slot, dk_head, sv_slot, sv_head, dv_slot, dv_head,
    D: tl.constexpr, DV: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ALIGNED: tl.constexpr,
    BN: tl.constexpr, HALF: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """grid [cdiv(rows, BN), layers]; a row is one head of one token. `layers` holds each layer's distance in elements
    from the first, for the four pools."""
    table = layers + tl.program_id(1) * 4
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    token, head = row // heads, row % heads
    read = tl.load(source + token, mask=row < rows, other=-1).to(tl.int64)
    write = tl.load(destination + token, mask=row < rows, other=-1).to(tl.int64)
    used = ((read >= 0) & (write >= 0))[:, None]
    place = tl.load(segment + token, mask=row < rows, other=0)

    p_read = source_k + tl.multiple_of(tl.load(table), ALIGNED) + (read * sk_slot + head * sk_head)[:, None]
    p_write = destination_k + tl.multiple_of(tl.load(table + 1), ALIGNED) + (write * dk_slot + head * dk_head)[:, None]
    pair = tl.arange(0, HALF)
    turning = used & (pair[None, :] < ROTARY // 2)
    at = place[:, None] * (ROTARY // 2) + pair[None, :]
    c, s = tl.load(cos + at, mask=turning, other=1.0), tl.load(sin + at, mask=turning, other=0.0)
    first = (pair * 2 if INTERLEAVED else pair)[None, :]
    second = first + (1 if INTERLEAVED else ROTARY // 2)
    a = tl.load(p_read + first, mask=turning, other=0.0).to(tl.float32)
    b = tl.load(p_read + second, mask=turning, other=0.0).to(tl.float32)
    tl.store(p_write + first, (a * c - b * s).to(destination_k.dtype.element_ty), mask=turning)
    tl.store(p_write + second, (b * c + a * s).to(destination_k.dtype.element_ty), mask=turning)
    for bit in tl.static_range(16):  # what is left of a head, in powers of two: no lane is idle
        if (D - ROTARY) & (1 << bit):
            rest = ROTARY + ((D - ROTARY) >> (bit + 1) << (bit + 1)) + tl.arange(0, 1 << bit)[None, :]
            tl.store(p_write + rest, tl.load(p_read + rest, mask=used), mask=used)
    if DV > 0:
        value = tl.arange(0, VALUES)[None, :]
        copied = used & (value < DV)
        p_read = source_v + tl.multiple_of(tl.load(table + 2), ALIGNED) + (read * sv_slot + head * sv_head)[:, None]
        x = tl.load(p_read + value, mask=copied)
        p_write = destination_v + tl.multiple_of(tl.load(table + 3), ALIGNED)
        tl.store(p_write + (write * dv_slot + head * dv_head)[:, None] + value, x, mask=copied)


def rerotate_scatter(plan: Plan) -> None:
    """See sglang_hybrid_kernels.rerotate_scatter."""
    k, into_k = plan.source_k[0], plan.destination_k[0]
    require(k.dtype != torch.float64, "take fp32, bf16 or fp16 keys for Triton, or the naive path for fp64", k.dtype)
    v, into_v = (_bits(x[0]) if x else k[:0] for x in (plan.source_v, plan.destination_v))
    _, heads, size = k.shape
    value_size = v.shape[2] if plan.source_v else 0
    rows = plan.source.numel() * heads
    if rows == 0:
        return
    pools = (plan.source_k, plan.destination_k, plan.source_v or plan.source_k, plan.destination_v or plan.source_k)
    distances = tuple(tuple(_distance(pool[layer], pool[0]) for pool in pools) for layer in range(len(plan.source_k)))
    cos, sin = (x.float().contiguous() for x in plan.rotation())
    source, destination = plan.source.contiguous(), plan.destination.contiguous()
    require_grid("layers", len(plan.source_k))
    block = max(1, BLOCK_ELEMENTS // triton.next_power_of_2(max(size, value_size)))
    rerotate_scatter_kernel[(triton.cdiv(rows, block), len(plan.source_k))](
        *(k, into_k, v, into_v, _table(distances, k.device), source, destination, plan.segments(), cos, sin),
        *(rows, heads, *k.stride()[:2], *into_k.stride()[:2], *v.stride()[:2], *into_v.stride()[:2]),
        D=size,
        DV=value_size,
        ROTARY=plan.rotary_dim,
        INTERLEAVED=plan.interleaved,
        ALIGNED=16 if all(x % 16 == 0 for layer in distances for x in layer) else 1,
        BN=block,
        HALF=triton.next_power_of_2(plan.rotary_dim // 2),
        VALUES=triton.next_power_of_2(max(1, value_size)),
        num_warps=4,
    )


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers: a copy keeps every bit, also of dtypes that Triton cannot compute with."""
    return x.view(_INTEGERS[x.element_size()])


def _distance(x: Tensor, base: Tensor) -> int:
    """From base to x in elements; tensors of one allocator lie whole elements apart."""
    return (x.data_ptr() - base.data_ptr()) // x.element_size()


@functools.lru_cache(maxsize=64)
def _table(distances: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(distances, dtype=torch.int64, device=device)
