"""The buffer of entries: every field of every layer has bytes of its own, and sizes are what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.segments import room
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.memory.sizing import SEGMENT
from tests.unit.engine.pools.arenas import opened

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
        names = ("transition_rows", "end_state", "window", "end_state_scale")
        found += [x for x in (getattr(layer, name) for name in names) if x is not None]
        if layer.transition_rows is None:
            found.append(layer.transition)
    return found


def of_transitions(store: Store) -> list[torch.Tensor]:
    """Those of all layers, by slot."""
    first = store.layers[0]
    assert all(layer.transition.data_ptr() == first.transition.data_ptr() for layer in store.layers)
    return [x for x in (first.transition, first.transition_scale) if x is not None]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_two_fields_share_a_byte(dense: bool, dtype: str) -> None:
    store = Store(shapes(dense), dtype, 200_000, CPU)
    block, views = 1, fields(store)
    for number, view in enumerate(views):
        view[block] = number
    for number, view in enumerate(views):
        assert (view[block] == number).all(), number
    for other in (0, 2):
        assert all(not view[other].any() for view in views)


def test_tokens_of_a_block_have_slots_of_their_own() -> None:
    store = Store(shapes(), "float32", 200_000, CPU)
    first, last = store.block_tokens, 2 * store.block_tokens - 1
    for number, view in enumerate([*store.kv.keys, *store.kv.values], 1):
        view[first], view[last] = number, 10 + number
    for number, view in enumerate([*store.kv.keys, *store.kv.values], 1):
        assert (view[first] == number).all()
        assert (view[last] == 10 + number).all()
        assert not view[first - 1].any()
        assert not view[last + 1].any()


def test_a_heads_kv_lies_behind_the_models() -> None:
    alone = Store(shapes(), "float32", 200_000, CPU)
    store = Store(replace(shapes(), head_layers=1), "float32", 200_000, CPU)
    assert (len(store.kv.keys), len(store.head_kv.keys), len(alone.head_kv.keys)) == (2, 1, 0)
    assert store.token_bytes == alone.token_bytes * 3 // 2
    slot = store.block_tokens
    planes = [*store.kv.keys, *store.kv.values, *store.head_kv.keys, *store.head_kv.values]
    for number, view in enumerate(planes, 1):
        view[slot] = number
    for number, view in enumerate(planes, 1):
        assert (view[slot] == number).all()
        assert not view[slot + 1].any()


def test_latents_are_kept_once() -> None:
    latent = replace(shapes(), kv_heads=1, value_size=0)
    store = Store(latent, "float32", 200_000, CPU)
    assert (len(store.kv.keys), store.kv.values) == (2, [])
    assert store.token_bytes == 2 * 16 * 2
    store.kv.keys[1][store.block_tokens] = 7
    assert not store.kv.keys[0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_transitions_have_slots_of_their_own(dtype: str) -> None:
    store = Store(shapes(), dtype, 200_000, CPU)
    assert store.transitions == 3 * 4, "heads of all layers"
    slots = store.blocks.transitions.take(store.transitions)
    beside = store.blocks.take_state()
    for view in fields(store):
        view[beside] = 77
    for number, slot in enumerate(slots.tolist()):
        for view in of_transitions(store):
            view[slot] = number
    for number, slot in enumerate(slots.tolist()):
        assert all((view[slot] == number).all() for view in of_transitions(store)), number
    assert all((view[beside] == 77).all() for view in fields(store))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_of_a_pool_have_memory_while_they_are_taken(dtype: str) -> None:
    arena, driver = opened(HostDriver, lambda: 0.0)
    budget = arena.sizing.total * arena.sizing.granule_bytes
    store = Store(shapes(), dtype, 0, CPU, lambda needs: room.shared(arena, budget, needs))
    blocks, used = store.blocks, arena.budget.used
    count = arena.supplies[SEGMENT].pool.layout.column_pages + 1  # block 0 has a column, which others fill first
    assert store.block_bytes >= store.state_bytes
    assert store.block_tokens * store.token_bytes <= store.block_bytes
    assert store.block_bytes >= store.transition_bytes
    assert blocks.hold(count, 2 * store.block_tokens, 12)
    slots = torch.from_numpy(blocks.kv.take(2 * store.block_tokens))
    states = torch.tensor([blocks.take_state() for _ in range(count)])
    rows = torch.from_numpy(blocks.transitions.take(12))
    for number, view in enumerate(fields(store)):
        view[states] = number
    for number, view in enumerate(of_transitions(store)):
        for each in rows.tolist():  # they overlap, so all at once is undefined
            view[each] = 50 + number
    for number, view in enumerate([*store.kv.keys, *store.kv.values], 1):
        view[slots] = torch.arange(len(slots), dtype=view.dtype)[:, None, None] + number
    for number, view in enumerate([*store.kv.keys, *store.kv.values], 1):
        assert (view[slots] == torch.arange(len(slots), dtype=view.dtype)[:, None, None] + number).all()
    for number, view in enumerate(fields(store)):
        assert (view[states] == number).all(), number
    assert all((view[rows] == 50 + number).all() for number, view in enumerate(of_transitions(store)))
    assert arena.budget.used > used
    blocks.kv.give(slots.numpy())
    blocks.transitions.give(rows.numpy())
    for block in states.tolist():
        blocks.give_state(block)
    arena.check()
    blocks.check()
    assert arena.budget.used == used
    arena.pooled.close()
    driver.close()


def test_the_granules_of_one_entry_have_a_bound() -> None:
    assert room.most_granules(room.Needs(100, 10), 40, 100) == 2 + 40 // 5 + 4 + 1
    assert room.most_granules(room.Needs(150, 10), 40, 100) == (2 + 40 // 10 + 2 + 1) * 2
    assert room.most_granules(room.Needs(100, 10, 12, 20), 40, 100) == 2 + 40 // 5 + 4 + 1 + 12 // 2 + 3 + 1


def test_states_of_an_entry_fit_into_a_block_and_a_block_is_whole_tokens() -> None:
    for dtype in ("float32", "bfloat16", "int8"):
        store = Store(shapes(), dtype, 200_000, CPU)
        assert store.state_bytes <= store.block_bytes == store.block_tokens * store.token_bytes
        assert store.block_bytes - store.state_bytes < store.token_bytes
        assert store.total_bytes == store.blocks.count * store.block_bytes <= 200_000


def test_states_in_int8_take_half_of_those_in_bfloat16() -> None:
    wide = Shapes(36, (32, 128, 128), (8192, 3), torch.bfloat16, True, 12, 2, 256, 256, torch.bfloat16)
    stores = {dtype: Store(wide, dtype, 600_000_000, CPU) for dtype in ("bfloat16", "int8")}
    sizes = {
        dtype: (its.state_bytes + its.transitions * its.transition_bytes) / (1 << 20) for dtype, its in stores.items()
    }
    assert sizes["bfloat16"] == pytest.approx(72 + 36 * 8192 * 3 * 2 / (1 << 20), rel=0.01)
    assert sizes["int8"] == pytest.approx(36 + 36 * (8192 * 3 * 2 + 2 * 32 * 128 * 4) / (1 << 20), rel=0.01)
    assert Store(wide, "bfloat16", 600_000_000, CPU).token_bytes == 24 * 1024


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"at least 0\.0\d+ GB.*raise --hybrid-segment-memory-gb: 0\.000"):
        Store(shapes(), "float32", 1000, CPU)
