"""Warming changes nothing, and what serving then launches is compiled already."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid_kernels import warm
from sglang_hybrid_kernels.copy_slots import copy_slots
from sglang_hybrid_kernels.state_at import state_at
from tests.kernels.calls import HEADS, K, V, randn
from tests.kernels.tensors import whole

ahead_of_time = importlib.import_module("benchmarks.kernels.compile")
LAYERS, SLOTS = 2, 5


def dense() -> list[Tensor]:
    """As SGLang's MambaPool: a convolution window and a state for every layer and slot."""
    return [randn(LAYERS, SLOTS, 64, 3, seed=0).bfloat16(), randn(LAYERS, SLOTS, HEADS, V, K, seed=1)]


def page_major(window: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """As elastic memory: all layers of a slot side by side, windows before states."""
    sizes = [LAYERS * 64 * 3 * window.itemsize, LAYERS * HEADS * V * K * 4]
    raw = torch.zeros(SLOTS, sum(sizes), dtype=torch.uint8)
    windows, states = raw.split(sizes, 1)
    pools = [
        windows.view(window).unflatten(1, (LAYERS, 64, 3)).transpose(0, 1),
        states.view(torch.float32).unflatten(1, (LAYERS, HEADS, V, K)).transpose(0, 1),
    ]
    return [pool.copy_(x) for pool, x in zip(pools, dense(), strict=True)]


def misaligned(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Its first element lies at no multiple of 16 bytes."""
    index = torch.tensor([0, *values], dtype=dtype)[1:]
    assert index.data_ptr() % 16
    return index


def prefill(
    tokens: int, sequences: int, dtype: torch.dtype = torch.bfloat16, by_channel: bool = False
) -> dict[str, Any]:
    """k and v are views of one wide tensor, as after SGLang's convolution."""
    k, v = torch.zeros(tokens, (1 + HEADS) * 128, dtype=dtype).split([128, HEADS * 128], 1)
    bounds = [*range(sequences), tokens]
    return {
        "h": torch.zeros(tokens // 64 + sequences, HEADS, 128, 128, dtype=dtype),
        "k": k.unflatten(1, (1, 128)),
        "v": v.unflatten(1, (HEADS, 128)),
        "g": torch.zeros(tokens, HEADS, *[128] * by_channel),
        "beta": torch.zeros(tokens, HEADS),
        "cu_seqlens": misaligned(*bounds, dtype=torch.int32),
    }


@pytest.mark.parametrize("pools", [dense, page_major])
def test_the_copies_of_serving_are_compiled_already(pools: Any):
    made = pools()
    with ahead_of_time.compiling_for(90) as launches:
        warm.warm_copy_slots(made)
        warmed = len(launches)
        for count in (1, 16, 33):
            copy_slots(made, misaligned(*range(count)), torch.arange(count), check_slots=False)
            copy_slots(made, torch.arange(count), misaligned(*range(count)), check_slots=False)
    assert warmed
    assert len(launches) == 7 * warmed
    assert len({id(kernel) for *_, kernel in launches}) == warmed


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_states_of_serving_are_compiled_already(by_channel: bool):
    pool = torch.zeros(LAYERS, SLOTS, HEADS, 128, 128)
    with ahead_of_time.compiling_for(90) as launches:
        options = {"key_heads": 1, "token_dtype": torch.bfloat16, "l2norm": True, "by_channel": by_channel}
        warm.warm_state_at(pool[0], **options)
        assert len(launches) == 1
        for tokens, sequences, count, layer in ((64, 1, 1, 0), (320, 16, 2, 1), (999, 17, 16, 1)):
            where = [misaligned(*[0] * count) for _ in range(3)]
            made = prefill(tokens, sequences, by_channel=by_channel)
            state_at(
                **made,
                sequence=where[0],
                position=where[1],
                into=pool[layer],
                slots=where[2],
                l2norm=True,
                check_slots=False,
            )
    assert len(launches) == 4
    assert len({id(kernel) for *_, kernel in launches}) == 1


def test_another_layout_is_another_kernel():
    """So that the tests above can fail: what is not warmed is compiled."""
    with ahead_of_time.compiling_for(90) as launches:
        warm.warm_copy_slots(dense())
        warm.warm_copy_slots(dense()[1:])
        pool = torch.zeros(SLOTS, HEADS, 128, 128)
        warm.warm_state_at(pool, key_heads=1, token_dtype=torch.bfloat16)
        warm.warm_state_at(pool, key_heads=1, token_dtype=torch.float32)
    assert len({id(kernel) for *_, kernel in launches}) == len(launches) == 4


def of_one_type() -> list[Tensor]:
    """What can be sent to the interpreter: it takes no two types over the same memory."""
    return [x.view(torch.float32) for x in page_major(torch.float32)]


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("pools", [dense, of_one_type])
def test_no_bit_changes(interpreted: Any, backend: str, pools: Any):
    made, before = pools(), pools()
    options = {"key_heads": 1, "token_dtype": torch.float32}
    if backend == "triton":
        interpreted("warm:warm_copy_slots", made)
        interpreted("warm:warm_state_at", made[1][0], **options)
    else:
        warm.warm_copy_slots(made)
        warm.warm_state_at(made[1][0], **options)
    assert all(torch.equal(whole(x), whole(was)) for x, was in zip(made, before, strict=True))
