"""Cutting packed sequences into chunks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.engine.cpu.varlen import ChunkPlan

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=7)


def plan_of(lengths, length):
    return ChunkPlan.of(torch.tensor([0, *lengths]).cumsum(0).tolist(), length)


@given(lengths=LENGTHS, length=st.integers(1, 8), budget=st.integers(0, 12))
def test_waves_cover_every_chunk_once_and_shrink(lengths, length, budget):
    plan = plan_of(lengths, length)
    assert plan.length == max(1, min(length, max(lengths)))
    assert plan.counts == [-(-n // plan.length) for n in lengths]
    assert plan.widths == sorted(plan.widths, reverse=True)
    assert plan.chunks == sum(plan.counts) == sum(plan.widths)
    indices = [plan.chunk_index(i, c) for i, n in enumerate(plan.counts) for c in range(n)]
    assert sorted(indices) == list(range(plan.chunks))
    assert plan.in_sequence_order.tolist() == indices
    if plan.order:
        assert plan.is_in_sequence_order == (indices == sorted(indices))
    widths, at = [], 0
    for first, last, block in plan.blocks(budget):
        assert first == at
        assert last - first == sum(block[:-1])
        assert len(block) == 2 or last - first <= budget
        widths += block[:-1]
        assert block[-1] == (plan.widths[len(widths)] if len(widths) < len(plan.widths) else 0)
        at = last
    assert (widths, at) == (plan.widths, plan.chunks)


@given(lengths=LENGTHS.filter(any), length=st.integers(1, 8), data=st.data())
def test_padding_and_packing_are_inverse(lengths, length, data):
    plan = plan_of(lengths, length)
    x = torch.arange(1.0, 1 + 2 * sum(lengths)).view(-1, 2)
    padded = plan.padded(x)
    assert padded.shape == (plan.chunks, plan.length, 2)
    assert torch.equal(plan.packed(padded), x)
    for i, (lo, hi) in enumerate(pairwise(plan.bounds)):
        for c in range(plan.counts[i]):
            tokens = x[lo + c * plan.length : min(hi, lo + (c + 1) * plan.length)]
            chunk = padded[plan.chunk_index(i, c)]
            assert torch.equal(chunk[: len(tokens)], tokens)
            assert not chunk[len(tokens) :].any()
    first = data.draw(st.integers(0, plan.chunks - 1))
    last = data.draw(st.integers(first + 1, plan.chunks))
    assert torch.equal(plan.padded(x, first, last), padded[first:last])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_is_in_float32(dtype):
    assert plan_of([3, 2], 2).padded(torch.ones(5, 1, dtype=dtype)).dtype == torch.float32
