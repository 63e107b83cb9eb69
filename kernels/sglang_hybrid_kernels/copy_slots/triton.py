"""Triton kernels of copy_slots: a program owns one block of a slot's elements and takes it through all pairs in order.

Owning a block across all pairs is what makes chains and repeated destinations mean the same as in a loop; a state of a
large model has thousands of blocks, so nothing is lost by it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_hybrid_kernels.copy_slots.check import Plain, Quantised

POOLS = 8
"""Pools per launch; more take several launches."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 4
"""Bytes: four words of a thread are the widest load. Of wider ones Triton sees less alignment, a multiple of 16 words.
"""
_BLOCKS = 2048
"""Blocks a launch wants at least, to fill a GPU."""

COUNTS = ["pairs", "slots", "into_slots"]
"""What makes no other kernel: nothing is compiled in the middle of serving."""


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["source", "destination"])
def copy_kernel(
    pools, into, source, destination, pairs, slots, into_slots, ends, blocks, rests, sizes, strides, into_strides,
    INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [blocks of all pools]. Pool p has the programs ends[p - 1] to ends[p]: an outermost index (a layer) and a
    block of the `rests[p]` elements below it, which lie in INNER[p] dimensions of `sizes`, the innermost first.
    strides: slot, outermost, then the inner dimensions."""
    item = tl.program_id(0)
    begin = 0
    for p in tl.static_range(len(INNER)):
        if (item >= begin) & (item < ends[p]):
            local = item - begin
            outer = (local // blocks[p]).to(tl.int64)
            rest = (local % blocks[p]) * BLOCK + tl.arange(0, BLOCK)
            inside = rest < rests[p]
            read = rest.to(tl.int64) * 0 + outer * strides[p][1]
            write = rest.to(tl.int64) * 0 + outer * into_strides[p][1]
            for d in tl.static_range(tl.constexpr(INNER[p])):  # Triton 3.6: an element of a constexpr tuple is an int
                index = rest if d == INNER[p] - 1 else rest % sizes[p][d]
                rest = rest // sizes[p][d]
                read += index.to(tl.int64) * strides[p][2 + d]
                write += index.to(tl.int64) * into_strides[p][2 + d]
            for pair in range(pairs):
                from_slot = tl.load(source + pair).to(tl.int64)
                to_slot = tl.load(destination + pair).to(tl.int64)
                valid = (from_slot >= 0) & (from_slot < slots) & (to_slot >= 0) & (to_slot < into_slots)
                x = tl.load(pools[p] + from_slot * strides[p][0] + read, mask=inside & valid)
                x = x.to(into[p].dtype.element_ty)
                tl.store(into[p] + to_slot * into_strides[p][0] + write, x, mask=inside & valid)
                tl.debug_barrier()  # the next pair may read this slot, an element perhaps by another thread
        begin = ends[p]


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["source", "destination"])
def quantise_kernel(
    pool, into, scale, source, destination, pairs, slots, into_slots, heads, V, K, strides, into_strides, scale_strides,
    TO_INT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grid [layers * heads, K / COLUMNS]. All V rows of COLUMNS key channels. Strides: slot, layer, head, V, K.
    TO_INT8 writes `scale`, its slots are the destinations'; else it is read, with the sources' slots."""
    layer, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    v = tl.arange(0, ROWS).to(tl.int64)[:, None]
    k = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    pool += layer * strides[1] + head * strides[2] + v * strides[3] + k * strides[4]
    into += layer * into_strides[1] + head * into_strides[2] + v * into_strides[3] + k * into_strides[4]
    scale += layer * scale_strides[1] + head * scale_strides[2] + k * scale_strides[4]
    inside = (v < V) & (k < K)
    for pair in range(pairs):
        from_slot = tl.load(source + pair).to(tl.int64)
        to_slot = tl.load(destination + pair).to(tl.int64)
        valid = (from_slot >= 0) & (from_slot < slots) & (to_slot >= 0) & (to_slot < into_slots)
        x = tl.load(pool + from_slot * strides[0], mask=inside & valid, other=0.0).to(tl.float32)
        if TO_INT8:
            largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=0, keep_dims=True)
            step = tl.div_rn(tl.maximum(largest, 1e-8), 127.0).to(scale.dtype.element_ty)
            tl.store(scale + to_slot * scale_strides[0], step, mask=(k < K) & valid)
            steps = tl.div_rn(x, step.to(tl.float32) + tl.zeros_like(x))
            steps = tl.minimum(tl.maximum(tl.where(steps == steps, steps, 0.0), -127.0), 127.0)
            steps = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds half to even
            tl.store(into + to_slot * into_strides[0], steps.to(tl.int8), mask=inside & valid)
        else:
            step = tl.load(scale + from_slot * scale_strides[0], mask=(k < K) & valid, other=0.0).to(tl.float32)
            tl.store(into + to_slot * into_strides[0], (x * step).to(into.dtype.element_ty), mask=inside & valid)


def copy_slots(
    plain: Sequence[Plain], quantised: Sequence[Quantised], source: Tensor, destination: Tensor, slot_dim: int
) -> None:
    """See sglang_hybrid_kernels.copy_slots; pools as check.split returns them."""
    source, destination = source.contiguous(), destination.contiguous()
    for (_, slots, into_slots), alike in _alike(plain, slot_dim).items():
        for first in range(0, len(alike), POOLS):
            _copy(alike[first : first + POOLS], slots, into_slots, source, destination)
    for entry in quantised:
        _convert(entry, source, destination, slot_dim)


class _Copy(NamedTuple):
    """One pool of a launch, in words: integers of one width, or floats where the dtype changes. The tensors only say
    where the first word lies and what it is."""

    pool: Tensor
    into: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    into_strides: tuple[int, ...]


def _alike(plain: Sequence[Plain], slot_dim: int) -> dict[tuple[int, int, int], list[_Copy]]:
    """Pools that are copied in words of the same width, between as many slots, share launches; a launch of several
    widths would move data between threads, through shared memory. Change of dtype: 0."""
    found: dict[tuple[int, int, int], list[_Copy]] = {}
    for pool, into in plain:
        if not pool.numel() or not into.numel():
            continue
        word, layout = 0, _plan(tuple(pool.shape), pool.stride(), into.stride(), slot_dim)
        slots, into_slots = pool.shape[slot_dim], into.shape[slot_dim]
        if pool.dtype == into.dtype:
            word, layout = _in_words(*layout, pool.element_size(), math.gcd(WORD, pool.data_ptr(), into.data_ptr()))
            pool, into = _words(pool, word), _words(into, word)
        found.setdefault((word, slots, into_slots), []).append(_Copy(pool, into, *layout))
    return found


def _copy(entries: Sequence[_Copy], slots: int, into_slots: int, source: Tensor, destination: Tensor) -> None:
    elements = sum(math.prod(entry.sizes) for entry in entries)
    block = min(8192, max(256, triton.next_power_of_2(elements // _BLOCKS)))
    ends, blocks, rests = [], [], []
    for entry in entries:
        rests.append(math.prod(entry.sizes[1:]))
        blocks.append(triton.cdiv(rests[-1], block))
        ends.append((ends[-1] if ends else 0) + entry.sizes[0] * blocks[-1])
    copy_kernel[(ends[-1],)](
        tuple(entry.pool for entry in entries),
        tuple(entry.into for entry in entries),
        source,
        destination,
        source.numel(),
        slots,
        into_slots,
        tuple(ends),
        tuple(blocks),
        tuple(rests),
        tuple(entry.sizes[:0:-1] for entry in entries),
        tuple(entry.strides[:2] + entry.strides[:1:-1] for entry in entries),
        tuple(entry.into_strides[:2] + entry.into_strides[:1:-1] for entry in entries),
        INNER=tuple(len(entry.sizes) - 1 for entry in entries),
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )


def _words(x: Tensor, word: int) -> Tensor:
    """The first word of x. Integers keep every bit, also of NaN and of dtypes that Triton cannot compute with."""
    return x.as_strided((max(1, word // x.element_size()),), (1,)).view(_INTEGERS[word])


@functools.lru_cache(maxsize=256)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], into_strides: tuple[int, ...], slot_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes of a slot's dimensions, outermost in the destination first, neighbours merged where both sides allow it;
    at least two. The strides have the slot's in front."""
    dims = [i for i, size in enumerate(shape) if i != slot_dim and size > 1]
    dims.sort(key=lambda i: (-into_strides[i], -strides[i]))
    merged: list[tuple[int, int, int]] = []
    for size, stride, into_stride in ((shape[i], strides[i], into_strides[i]) for i in dims):
        if merged and merged[-1][1] == stride * size and merged[-1][2] == into_stride * size:
            merged[-1] = (merged[-1][0] * size, stride, into_stride)
        else:
            merged.append((size, stride, into_stride))
    merged = [(1, 0, 0)] * (2 - len(merged)) + merged
    sizes, out, into_out = zip(*merged, strict=True)
    return sizes, (strides[slot_dim], *out), (into_strides[slot_dim], *into_out)


@functools.lru_cache(maxsize=256)
def _in_words(
    sizes: tuple[int, ...], strides: tuple[int, ...], into_strides: tuple[int, ...], element: int, alignment: int
) -> tuple[int, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The widest word up to WORD bytes that divides every size, stride and address (`alignment` bytes), and the plan
    in such words. Elements that do not lie side by side are words."""
    if not strides[-1] == into_strides[-1] == 1:
        return element, (sizes, strides, into_strides)
    outer = (strides[:-1], into_strides[:-1])
    word = math.gcd(alignment, sizes[-1] * element, *(stride * element for side in outer for stride in side))
    sizes = (*sizes[:-1], sizes[-1] * element // word)
    read, write = ((*(stride * element // word for stride in side), 1) for side in outer)
    return word, (sizes, read, write)


def _convert(entry: Quantised, source: Tensor, destination: Tensor, slot_dim: int) -> None:
    pool, into, scale, into_scale = entry
    if not pool.numel() or not into.numel():
        return
    to_int8 = into_scale is not None
    pool, into, scale = (_five(x, slot_dim) for x in (pool, into, into_scale if to_int8 else scale))
    slots, layers, heads, rows, columns = pool.shape
    block_rows = max(2, triton.next_power_of_2(rows))
    block = max(2, min(triton.next_power_of_2(columns), 8192 // block_rows))
    quantise_kernel[(layers * heads, triton.cdiv(columns, block))](
        pool,
        into,
        scale,
        source,
        destination,
        source.numel(),
        slots,
        into.shape[0],
        heads,
        rows,
        columns,
        pool.stride(),
        into.stride(),
        scale.stride(),
        TO_INT8=to_int8,
        ROWS=block_rows,
        COLUMNS=block,
        num_warps=8,
    )


def _five(x: Tensor, slot_dim: int) -> Tensor:
    """[slots, layers, heads, V, K] view of [layers, slots, ..., V, K] or [slots, ..., V, K]."""
    x = x.movedim(slot_dim, 0)
    if slot_dim == 0:
        x = x.unsqueeze(1)
    return x if x.dim() == 5 else x.unsqueeze(2)
