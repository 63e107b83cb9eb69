"""SGLang's own way to the memory of a batch, over our cache: what admission has promised is there."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.requests import tracked
from tests.engine.tree import Tree

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::Warning:sglang")]


def request(number: int) -> Any:
    """A request that waits."""
    from sglang.srt.managers import schedule_batch

    asks = SimpleNamespace(
        rid=str(number), output_ids=[], session=None, mamba_host_hit_length=0, inflight_middle_chunks=0
    )
    classes = [found for _, found in inspect.getmembers(schedule_batch, inspect.isclass)]
    memory = [found for found in classes if "mamba_needs_clear" in getattr(found, "__dataclass_fields__", {})]
    if memory:
        asks.kv = memory[0]()
    else:  # 0.5.17
        names = ("mamba_pool_idx", "mamba_ping_pong_track_buffer", "mamba_cow_src_index", "req_pool_idx", "session_id")
        vars(asks).update(dict.fromkeys(names), mamba_needs_clear=False, kv_committed_len=0)
    return asks


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("planned", [0, 7, 12, 20])
def test_slots_of_checkpoints_in_the_making_are_given_to_whom_they_were_promised(warm: bool, planned: int) -> None:
    """The overlap schedule admits a batch while another one still writes its states."""
    from sglang.srt.mem_cache.allocation import alloc_req_slots

    tree = Tree("forecast", tokens=16384, states=32, page_size=64)
    rng, memory = random.Random(planned), tree.coordinator.memory
    if warm:
        for _ in range(40):
            tree.insert([rng.randrange(5000) for _ in range(64)])
        tree.rows.clear()
        tree.slots.clear()
    running = request(0)
    alloc_req_slots(tree.rows, [running], tree.cache)
    made = tracked(running)
    for at in range(planned):
        if not memory.states.available_size():
            memory.ensure_states(1)
        assert tree.coordinator.slots.reserve(made, 64 * (at + 1), 64 * (at + 1))
    admitted: list[Any] = []
    for number in range(1, 8):  # there are eight rows
        asks = request(number)
        if memory.room_for(SimpleNamespace(can_run_list=admitted, page_size=64), asks):
            admitted.append(asks)
    assert admitted
    alloc_req_slots(tree.rows, admitted, tree.cache)
    assert all(compat.state_of(each).mamba_pool_idx is not None for each in admitted)


def test_a_flush_leaves_no_node_in_memory() -> None:
    """Weights are updated again and again, and nothing is evicted in between."""
    tree, rng = Tree("forecast", tokens=8192, states=64), random.Random(0)
    for _ in range(3):
        for _ in range(20):
            tree.insert([rng.randrange(5000) for _ in range(100)])
        victims = tree.coordinator.victims
        assert victims._dirty
        tree.rows.clear()
        tree.slots.clear()
        tree.cache.reset()
        assert not victims._dirty
        assert not any(victims._pending.values())
        assert not victims.chosen
