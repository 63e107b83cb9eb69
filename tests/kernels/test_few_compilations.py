"""Numbers of requests, heads, tokens and slots, and where index tensors lie, make no other kernel for segments.

A pass of composed prompts cuts its indices out of one tensor, so they begin at any of its numbers. What Triton compiles
anew for one of them is compiled in the middle of serving, and a scheduler stands still for seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_hybrid_kernels.chunk_h_jump import chunk_h_jump
from sglang_hybrid_kernels.chunk_transition import chunk_transition
from sglang_hybrid_kernels.copy_slots import copy_slots
from sglang_hybrid_kernels.rerotate_scatter import rerotate_scatter
from sglang_hybrid_kernels.seam_attention import seam_attention

ahead_of_time = importlib.import_module("benchmarks.kernels.compile")
HEADS, SIZE = 4, 64
COUNTS = (1, 2, 16, 17)


def cut(start: int, *parts: list[int]) -> list[Tensor]:
    """Parts of one int64 tensor, side by side behind its first `start` numbers."""
    whole = torch.tensor([0] * start + [number for part in parts for number in part])
    return list(whole[start:].split([len(part) for part in parts]))


def attention(start: int, count: int) -> None:
    pool, tokens = torch.zeros(9, 1, SIZE, dtype=torch.bfloat16), 3 * count
    q = torch.zeros(tokens, HEADS, SIZE, dtype=torch.bfloat16)
    bounds, positions, ends = cut(start, [*range(0, tokens + 1, 3)], [0] * tokens, [0] * (count + 1))
    for longest in (1, 5000):
        seam_attention(q, pool, pool, ends[:1], ends, positions, bounds, longest=longest, check_slots=False)


def jumps(start: int, count: int) -> None:
    tokens = 3 * count
    bounds, rows, slots, jump = cut(start, [*range(0, tokens + 1, 3)], [0, count], [0], [-1] * count)
    k, w, u, g = (torch.zeros(tokens, *shape) for shape in ((2, SIZE), (HEADS, SIZE), (HEADS, SIZE), (HEADS,)))
    state, kept = torch.zeros(2, HEADS, SIZE, SIZE), torch.zeros(6, HEADS, SIZE, SIZE).bfloat16()
    where = torch.zeros(6, HEADS, dtype=torch.int64)
    for size in (16, 64):
        for heads, keys in ((slice(None), slice(None)), (slice(1, 2), slice(1))):  # all at once, and one of them
            chunk_h_jump(
                k[:, keys], w[:, heads], u[:, heads], g[:, heads], state[:, heads], slots, bounds, rows, jump,
                kept[0], kept[:, heads], transition_rows=where[:, heads], chunk_size=size, check_slots=False,
            )  # fmt: skip


def moves(start: int, count: int) -> None:
    pools = [torch.zeros(9, 1, SIZE).bfloat16() for _ in range(2)]
    source, delta, bounds, target = cut(start, [0] * count, [3], [0, count], [0] * count)
    turns = torch.ones(16, dtype=torch.float64)
    rerotate_scatter(
        pools, pools, source, target, delta, bounds, turns, source_v=pools, destination_v=pools, check_slots=False
    )


def transitions(start: int, count: int) -> None:
    bounds, entries = cut(start, [*range(0, 3 * count + 1, 3)], [*range(count)])
    k, v, g = (torch.zeros(3 * count, *shape) for shape in ((2, SIZE), (HEADS, SIZE), (HEADS,)))
    made = torch.zeros(count, HEADS, SIZE, SIZE)
    flags = torch.zeros(count, HEADS, dtype=torch.bool)
    chunk_transition(k, v, g, g, bounds, entries, made, made.clone(), vanishing=flags, check_slots=False)


def entries(start: int, count: int) -> None:
    made = torch.zeros(count, HEADS, SIZE, SIZE)
    source, target = cut(start, [*range(count)], [*range(count)])
    kept, scale = torch.zeros(40, HEADS, SIZE, SIZE), torch.zeros(40, HEADS, 1, SIZE)
    for into, scales in ((kept.bfloat16(), None), (kept.to(torch.int8), scale)):
        copy_slots([made], source, target, into=[into], into_scales=[scales], slot_dim=0, check_slots=False)


@pytest.fixture
def compiled() -> Iterator[list[tuple[str, dict[str, object], object]]]:
    with ahead_of_time.compiling_for(90) as launches:
        yield launches


KERNELS = {  # how many each call takes
    attention: {"attend_kernel": 2, "join_kernel": 1},  # for texts of one part, and of several
    jumps: {"chunk_h_jump_kernel": 2},  # for short chunks, and for long ones
    moves: {"rerotate_scatter_kernel": 1},
    transitions: {"solve_kernel": 1, "advance_kernel": 1, "flag_kernel": 1},
    entries: {"copy_kernel": 1, "quantise_kernel": 1},
}


@pytest.mark.parametrize("call", KERNELS, ids=lambda call: call.__name__)
def test_one_kernel_for_all_counts_and_places(compiled: list[tuple[str, dict[str, object], object]], call) -> None:
    for start in (0, 1):
        for count in COUNTS:
            call(start, count)
    found: dict[str, set[int]] = {}
    for name, _, kernel in compiled:
        found.setdefault(name, set()).add(id(kernel))
    assert {name: len(kernels) for name, kernels in found.items()} == KERNELS[call]
