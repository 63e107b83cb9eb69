"""copy_slots: the naive path against indexing, Triton against the naive path to the bit, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid_kernels.copy_slots import copy_slots
from tests.kernels.tensors import whole

SOURCE, DESTINATION = torch.tensor([1, 3, -1, 4, 4, 2, 0]), torch.tensor([2, 0, 5, -1, 6, 6, 5])
"""Skipped pairs, a slot written twice (6) and slots read after they were written (2, 0)."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mamba_pools() -> list[Tensor]:
    """Temporal state, two convolution windows of other dtypes, and a byte pool, as lists of layers and slots."""
    return [
        randn(3, 7, 2, 16, 8),
        randn(3, 7, 130, 3, seed=1, dtype=torch.bfloat16),
        randn(3, 7, 3, 5, seed=2, dtype=torch.float16),
        (randn(3, 7, 33, seed=3) * 50).to(torch.int8),
    ]


def envelope() -> list[Tensor]:
    """Page-major: all layers of a slot lie together, state and window are views of one buffer poisoned with NaN."""
    raw = torch.full((7, 3 * (2 * 16 * 8 + 30) + 5), torch.nan)
    temporal = raw[:, : 3 * 256].view(7, 3, 2, 16, 8).transpose(0, 1)
    conv = raw[:, 768 : 768 + 90].view(7, 3, 30).transpose(0, 1)
    temporal.copy_(randn(3, 7, 2, 16, 8))
    conv.copy_(randn(3, 7, 30, seed=1))
    return [temporal, conv]


def transposed() -> list[Tensor]:
    return [randn(3, 7, 8, 16, 2).permute(0, 1, 4, 2, 3), randn(7, 3, 5, 4).transpose(0, 1)[..., ::2]]


def odd() -> list[Tensor]:
    """No words of four bytes: odd addresses, distances of slots, numbers of elements. Then float64: two words each."""
    address = randn(3 * 7 * 6 + 1, dtype=torch.bfloat16)[1:].view(3, 7, 6)
    distance = randn(7, 3 * 4 + 1, seed=1, dtype=torch.float16)[:, :12].view(7, 3, 4).transpose(0, 1)
    count = randn(3, 7, 5, seed=2, dtype=torch.bfloat16)
    return [address, distance, count, randn(3, 7, 9, seed=3, dtype=torch.float64)]


POOLS = {"mamba": mamba_pools, "envelope": envelope, "transposed": transposed, "odd": odd}


def test_a_pair_is_an_assignment_and_pairs_run_in_order():
    pools = mamba_pools()
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        for read, write in ((1, 2), (3, 0), (4, 6), (2, 6), (0, 5)):
            pool[:, write] = pool[:, read]
    copy_slots(pools, SOURCE, DESTINATION)
    assert all(torch.equal(pool, want) for pool, want in zip(pools, expected, strict=True))


@pytest.mark.parametrize("name", POOLS)
def test_triton_copies_every_bit_and_touches_nothing_else(interpreted: Any, name: str):
    pools, expected = POOLS[name](), POOLS[name]()
    copy_slots(expected, SOURCE, DESTINATION)
    interpreted("copy_slots", pools, SOURCE, DESTINATION)
    assert all(torch.equal(whole(pool), whole(want)) for pool, want in zip(pools, expected, strict=True))


def test_bits_of_nan_and_of_eight_bit_floats_survive(interpreted: Any):
    words = torch.randint(-(2**31), 2**31 - 1, (2, 3, 70), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    pools = [words.view(torch.float32), words.to(torch.int8).view(torch.float8_e4m3fn)]
    before = [whole(pool).view(2, 3, -1).clone() for pool in pools]
    interpreted("copy_slots", pools, torch.tensor([2], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))
    for pool, was in zip(pools, before, strict=True):
        now = whole(pool).view(2, 3, -1)
        assert torch.equal(now[:, 0], was[:, 2])
        assert torch.equal(now[:, 1:], was[:, 1:])


def test_more_pools_than_one_launch_takes_and_slots_first(interpreted: Any):
    pools = [randn(7, 5 + i, seed=i) for i in range(11)]
    expected = [pool.clone() for pool in pools]
    copy_slots(expected, SOURCE, DESTINATION, slot_dim=0)
    interpreted("copy_slots", pools, SOURCE, DESTINATION, slot_dim=0)
    assert all(torch.equal(pool, want) for pool, want in zip(pools, expected, strict=True))
    assert torch.equal(pools[0][5], pools[0][0])


@pytest.mark.parametrize(
    ("dtype", "into_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_into_another_pool_with_rounding(interpreted: Any, dtype: torch.dtype, into_dtype: torch.dtype):
    pools = [randn(2, 7, 3, 20, dtype=dtype)]
    into = [torch.full((2, 9, 3, 20), torch.nan, dtype=into_dtype)]
    expected = [x.clone() for x in into]
    copy_slots(pools, SOURCE, DESTINATION, into=expected)
    assert torch.equal(expected[0][:, 2], pools[0][:, 1].to(into_dtype))
    assert expected[0][:, 7:].isnan().all()
    interpreted("copy_slots", pools, SOURCE, DESTINATION, into=into)
    assert torch.equal(whole(into[0]), whole(expected[0]))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 7, 3, 16, 40), (2, 7, 5, 3)])
def test_eight_bit_checkpoints_there_and_back(interpreted: Any, shape: tuple[int, ...], scale_dtype: torch.dtype):
    state = randn(*shape)
    state[:, 1, ..., 1] = 0.0
    scale_shape = (*shape[:-2], 1, shape[-1])

    def empty() -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.full(shape, 99, dtype=torch.int8),
            torch.full(scale_shape, 7.0, dtype=scale_dtype),
            torch.full(shape, torch.nan),
        )

    values, scale, back = empty()
    copy_slots([state], SOURCE, DESTINATION, into=[values], into_scales=[scale])
    written, read = DESTINATION[[0, 1, 5, 6]], SOURCE[[0, 1, 5, 6]]
    largest = state[:, read].abs().amax(-2, keepdim=True)
    torch.testing.assert_close(scale[:, written].float(), largest.clamp(min=1e-8) / 127, rtol=2**-8, atol=0)
    copy_slots([values], written, read, into=[back], scales=[scale])
    error = (back[:, read] - state[:, read]).abs()
    assert (
        error <= scale[:, written].float() * 0.5001 + largest * (2**-8 if scale_dtype == torch.bfloat16 else 0)
    ).all()
    assert (back[:, 1, ..., 1] == 0.0).all()

    other_values, other_scale, other_back = empty()
    interpreted("copy_slots", [state], SOURCE, DESTINATION, into=[other_values], into_scales=[other_scale])
    interpreted("copy_slots", [other_values], written, read, into=[other_back], scales=[other_scale])
    assert torch.equal(other_values, values)
    assert torch.equal(other_scale, scale)
    assert torch.equal(whole(other_back), whole(back))


def test_eight_bit_checkpoints_move_with_their_scales():
    values, scale = (randn(2, 7, 4, 6) * 50).to(torch.int8), randn(2, 7, 1, 6)
    wanted, wanted_scale = values[:, 1].clone(), scale[:, 1].clone()
    copy_slots([values], SOURCE, DESTINATION, scales=[scale], into_scales=[scale])
    assert torch.equal(values[:, 2], wanted)
    assert torch.equal(scale[:, 2], wanted_scale)


def test_float64_pools_keep_their_precision():
    state = randn(2, 7, 4, 6).double() / 3
    values, scale = torch.zeros(2, 7, 4, 6, dtype=torch.int8), torch.zeros(2, 7, 1, 6, dtype=torch.float64)
    copy_slots([state], SOURCE[:1], DESTINATION[:1], into=[values], into_scales=[scale])
    assert torch.equal(scale[:, 2], state[:, 1].abs().amax(-2, keepdim=True) / 127)


def test_nothing_to_do(interpreted: Any):
    none = torch.zeros(0, dtype=torch.int64)
    pool = randn(2, 3, 4)
    before = pool.clone()
    for call in (lambda *a: interpreted("copy_slots", *a), copy_slots):
        call([pool], none, none)
        call([], none, none)
        call([pool[..., :0]], torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(pool, before)


def test_unchecked_slots_out_of_range_are_skipped(interpreted: Any):
    pools, expected = mamba_pools(), mamba_pools()
    source, destination = torch.tensor([7, 1, 2]), torch.tensor([0, 7, 3])
    copy_slots(expected, torch.tensor([2]), torch.tensor([3]))
    for call in (lambda *a, **k: interpreted("copy_slots", *a, **k), copy_slots):
        call(pools, source, destination, check_slots=False)
        assert all(torch.equal(pool, want) for pool, want in zip(pools, expected, strict=True))


def overlapping(shape: tuple[int, ...], dtype: torch.dtype, distance: int, slots: int) -> Tensor:
    """A pool full of 7 whose slots begin every `distance` elements: they overlap where that is less than a slot has."""
    size = torch.Size(shape).numel()
    room = torch.full(((slots - 1) * distance + size,), 7, dtype=dtype)
    return room.as_strided((slots, *shape), (distance, *torch.empty(shape).stride()))


@pytest.mark.parametrize("distance", [64, 52, 600])
@pytest.mark.parametrize("shape", [(16, 16), (2, 16, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_into_slots_that_overlap(interpreted: Any, dtype: torch.dtype, shape: tuple[int, ...], distance: int):
    """Pools of rows that are numbered in a part of a row: what no pair names keeps its bits."""
    given, source = [randn(4, *shape)], torch.arange(4)
    destination = torch.tensor([11, -1, 0, 6])  # 5 x 52 elements are more than a row

    def empty() -> dict[str, list[Tensor]]:
        pool = {"into": [overlapping(shape, dtype, distance, 12)]}
        if dtype is torch.int8:
            pool["into_scales"] = [overlapping((*shape[:-2], 1, shape[-1]), torch.float32, distance // 4, 12)]
        return pool

    got, want, plain = empty(), empty(), empty()
    interpreted("copy_slots", given, source, destination, slot_dim=0, check_slots=False, **got)
    copy_slots(given, source, destination, slot_dim=0, check_slots=False, **want)
    dense = [torch.zeros(4, *shape, dtype=dtype)]
    scale = [torch.zeros(4, *shape[:-2], 1, shape[-1])] if dtype is torch.int8 else None
    copy_slots(given, source, source, into=dense, into_scales=scale, slot_dim=0)
    for pool, values in zip([x for some in plain.values() for x in some], [*dense, *(scale or [])], strict=True):
        for read, write in ((0, 11), (2, 0), (3, 6)):
            pool[write] = values[read]
    for name, pools in plain.items():
        assert torch.equal(whole(want[name][0]), whole(pools[0]))
        assert torch.equal(whole(got[name][0]), whole(pools[0]))


A, B = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5, dtype=torch.int8)
ONE, SCALE = torch.tensor([1]), torch.zeros(2, 3, 1, 5)
BAD = {
    "slot_dim must be 0": {"slot_dim": 2},
    "as many destinations": {"into": [A, A]},
    r"source must have shape \[any\]": {"source": torch.zeros(1, 1, dtype=torch.int64)},
    "convert source to one of int32, int64": {"source": torch.zeros(1)},
    "equally long": {"source": torch.tensor([0, 1])},
    r"slots of the pool, 0 to 2, or be negative: 3": {"destination": torch.tensor([3])},
    r"source must name slots": {"source": torch.tensor([9])},
    "but for the slots": {"into": [torch.zeros(2, 3, 4, 6)]},
    "share no memory": {"into": [A.view(torch.float16)[..., :5]]},
    "only int8 pools have scales": {"scales": [SCALE]},
    r"give into_scales\[0\]": {"into": [B]},
    r"give scales\[0\]": {"pools": [B], "into": [A]},
    "both scales or none": {"pools": [B], "into": [B], "scales": [SCALE]},
    r"must have shape \[2, 3, 1, 5\]": {"into": [B], "into_scales": [torch.zeros(2, 3, 1, 4)]},
    r"convert into\[0\] to one of": {"into": [torch.zeros(2, 3, 4, 5, dtype=torch.int32)]},
    "one device": {"into": [torch.zeros(2, 3, 4, 5, device="meta")]},
    "slot dimension": {"pools": [torch.zeros(3)], "into": [torch.zeros(3)]},
    "at most 8 bytes": {"pools": [A.to(torch.complex128)], "into": [A.to(torch.complex128)]},
    "to be scaled": {"pools": [A[..., 0]], "into": [B[..., 0]], "into_scales": [SCALE[..., 0]]},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_its_remedy(message: str):
    arguments = {"pools": [A], "source": ONE, "destination": ONE} | BAD[message]
    pools, source, destination = (arguments.pop(name) for name in ("pools", "source", "destination"))
    with pytest.raises(ValueError, match=message):
        copy_slots(pools, source, destination, **arguments)


def test_a_negative_slot_is_no_bad_slot():
    pool = torch.ones(2, 3, 4)
    copy_slots([pool], torch.tensor([-1]), torch.tensor([2]))
    assert torch.equal(pool, torch.ones(2, 3, 4))
