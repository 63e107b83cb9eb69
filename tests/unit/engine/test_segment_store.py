"""The buffer of entries: every field of every layer has bytes of its own, and sizes are what is said of them."""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.segments import room
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.memory.sizing import SEGMENT
from tests.unit.engine.arenas import opened

CPU = torch.device("cpu")


def shapes(dense: bool = True) -> Shapes:
    return Shapes(
        linear_layers=3,
        temporal=(4, 8, 6 if not dense else 8),
        window=(40, 3),
        window_dtype=torch.bfloat16,
        dense=dense,
        attention_layers=2,
        kv_heads=2,
        key_size=16,
        value_size=12,
        kv_dtype=torch.float16,
    )


def fields(store: Store) -> list[torch.Tensor]:
    found = []
    for layer in store.layers:
        names = ("transition", "end_state", "window", "vanishing", "transition_scale", "end_state_scale")
        found += [x for x in (getattr(layer, name) for name in names) if x is not None]
    return found


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_two_fields_share_a_byte(dense: bool, dtype: str) -> None:
    store = Store(shapes(dense), dtype, 200_000, CPU)
    block, views = 1, fields(store)
    for number, view in enumerate(views):
        view[block] = number % 2 if view.dtype is torch.bool else number
    for number, view in enumerate(views):
        wanted = number % 2 if view.dtype is torch.bool else number
        assert (view[block] == wanted).all(), number
    for other in (0, 2):
        assert all(not view[other].any() for view in views)


def test_tokens_of_a_block_have_slots_of_their_own() -> None:
    store = Store(shapes(), "float32", 200_000, CPU)
    first, last = store.block_tokens, 2 * store.block_tokens - 1
    for number, view in enumerate([*store.keys, *store.values], 1):
        view[first], view[last] = number, 10 + number
    for number, view in enumerate([*store.keys, *store.values], 1):
        assert (view[first] == number).all()
        assert (view[last] == 10 + number).all()
        assert not view[first - 1].any()
        assert not view[last + 1].any()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_of_a_pool_have_memory_while_they_are_taken(dtype: str) -> None:
    arena, driver = opened(HostDriver, lambda: 0.0)
    budget = arena.sizing.total * arena.sizing.granule_bytes
    store = Store(shapes(), dtype, 0, CPU, lambda state, token: room.shared(arena, budget, state, token))
    blocks, used = store.blocks, arena.budget.used
    count = arena.supplies[SEGMENT].pool.layout.column_pages + 1  # block 0 has a column, which others fill first
    assert store.block_bytes >= store.state_bytes
    assert store.block_tokens * store.token_bytes <= store.block_bytes
    assert blocks.hold(count, 2 * store.block_tokens)
    slots = torch.from_numpy(blocks.take_tokens(2 * store.block_tokens))
    states = torch.tensor([blocks.take_state() for _ in range(count)])
    for number, view in enumerate(fields(store)):
        view[states] = number % 2 if view.dtype is torch.bool else number
    for number, view in enumerate([*store.keys, *store.values], 1):
        view[slots] = torch.arange(len(slots), dtype=view.dtype)[:, None, None] + number
    for number, view in enumerate([*store.keys, *store.values], 1):
        assert (view[slots] == torch.arange(len(slots), dtype=view.dtype)[:, None, None] + number).all()
    for number, view in enumerate(fields(store)):
        assert (view[states] == (number % 2 if view.dtype is torch.bool else number)).all(), number
    assert arena.budget.used > used
    blocks.give_tokens(slots.numpy())
    for block in states.tolist():
        blocks.give_state(block)
    arena.check()
    blocks.check()
    assert arena.budget.used == used
    arena.pooled.close()
    driver.close()


def test_the_granules_of_one_entry_have_a_bound() -> None:
    assert room.most_granules(100, 10, 40, 100) == 2 + 40 // 5 + 4 + 1
    assert room.most_granules(150, 10, 40, 100) == (2 + 40 // 10 + 2 + 1) * 2


def test_states_of_an_entry_fit_into_a_block_and_a_block_is_whole_tokens() -> None:
    for dtype in ("float32", "bfloat16", "int8"):
        store = Store(shapes(), dtype, 200_000, CPU)
        assert store.state_bytes <= store.block_bytes == store.block_tokens * store.token_bytes
        assert store.block_bytes - store.state_bytes < store.token_bytes
        assert store.total_bytes == store.blocks.count * store.block_bytes <= 200_000


def test_states_in_int8_take_half_of_those_in_bfloat16() -> None:
    wide = Shapes(36, (32, 128, 128), (8192, 3), torch.bfloat16, True, 12, 2, 256, 256, torch.bfloat16)
    sizes = {dtype: Store(wide, dtype, 600_000_000, CPU).state_bytes / (1 << 20) for dtype in ("bfloat16", "int8")}
    assert sizes["bfloat16"] == pytest.approx(72 + 36 * 8192 * 3 * 2 / (1 << 20), rel=0.01)
    assert sizes["int8"] == pytest.approx(36 + 36 * (8192 * 3 * 2 + 2 * 32 * 128 * 4) / (1 << 20), rel=0.01)
    assert Store(wide, "bfloat16", 600_000_000, CPU).token_bytes == 24 * 1024


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"at least 0\.0\d+ GB.*raise --hybrid-segment-memory-gb: 0\.000"):
        Store(shapes(), "float32", 1000, CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_segment_that_leaves_states_alone_is_the_identity(dtype: str) -> None:
    from sglang_hybrid_kernels.compose.check import Operators
    from sglang_hybrid_kernels.compose.naive import applied, operator

    for dense in (True, False):
        layer = Store(shapes(dense), dtype, 200_000, CPU).layers[1]
        layer.transition.fill_(3)
        layer.leave_alone(torch.tensor([1]))
        stored = (layer.transition, layer.end_state, layer.transition_scale, layer.end_state_scale, layer.vanishing)
        transition, end = operator(
            Operators(*(None if x is None else x[None] for x in stored)), 1, torch.float32
        )  # fmt: skip
        state = torch.randn(1, *layer.end_state.shape[1:])
        torch.testing.assert_close(applied(state, transition) + end, state)
