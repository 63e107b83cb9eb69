"""What both kinds of memory promise: state slots, by eviction, then by taking checkpoints in the making back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import preset
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.cache import build, hooks
from sglang_hybrid.engine.cache.checkpoint_slots import CheckpointSlots
from sglang_hybrid.engine.cache.memory import Memory, Parts, StaticMemory
from sglang_hybrid.engine.cache.metrics import Account
from sglang_hybrid.engine.cache.requests import Tracked
from sglang_hybrid.engine.pools import build as elastic
from sglang_hybrid.engine.pools.memory import ElasticMemory, memory_of
from sglang_hybrid.engine.pools.telemetry import Telemetry
from sglang_hybrid.memory.sizing import STATE
from sglang_hybrid.prefix.pools import PoolKind
from tests.unit.engine.pools.arenas import opened

SPEC = preset("qwen3.5-35b-a3b")


class Slots:
    """SGLang's allocator of state slots: `size` of them."""

    def __init__(self, size: int) -> None:
        self.size, self._free = size, list(range(size))
        self.beside = 0  # of the unified pool: slots whose memory is that of KV

    def available_size(self) -> int:
        return len(self._free)

    def schedulable_available_size(self) -> int:
        return len(self._free) - self.beside

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > self.schedulable_available_size():
            return None
        return torch.tensor([self._free.pop() for _ in range(count)])

    def free(self, slots: torch.Tensor) -> None:
        self._free += slots.tolist()


class ElasticSlots:
    """The same over the states of an arena."""

    def __init__(self, supply: Any) -> None:
        self._supply, self.size = supply, supply.available

    def available_size(self) -> int:
        return int(self._supply.available)

    def alloc(self, count: int) -> Any:
        return self._supply.take(count)

    def free(self, slots: torch.Tensor) -> None:
        self._supply.give(slots)


class Cache:
    """A cache whose `evictable` states leave when they are asked to."""

    tree_core = req_to_token_pool = None
    enable_mamba_extra_buffer = False

    def __init__(self) -> None:
        self.evictable: list[torch.Tensor] = []
        self.states: Any = None

    def evict(self, wanted: Any) -> None:
        for slot in self.evictable[: wanted.mamba_num]:
            self.states.free(slot)
        del self.evictable[: wanted.mamba_num]

    def mamba_evictable_size(self) -> int:
        return len(self.evictable)

    def full_evictable_size(self) -> int:
        return 0

    mamba_protected_size = full_protected_size = full_evictable_size


@pytest.fixture(params=["static", "elastic"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    cache = Cache()
    core = SimpleNamespace(evictable_device_leaves=())
    cache.tree_core = core  # type: ignore[assignment]
    fits: list[Any] = []
    decisions: Any = SimpleNamespace(fit=lambda *given, **named: fits.append((given, named)), fits=fits)
    victims: Any = SimpleNamespace(unlocked=lambda core: ([], list(cache.evictable)), choose=lambda core, now: None)

    def parts(states: Any) -> Parts:
        cache.states = states
        return Parts(
            cache=cache, states=states, decisions=decisions, victims=victims, slots=CheckpointSlots(states),
            account=Account(states), now=lambda: 0.0,
        )  # fmt: skip

    if request.param == "static":
        yield StaticMemory(parts(Slots(8)))
        return
    arena, driver = opened(HostDriver, lambda: 0.0, page_tokens=1, total_bytes=1 << 20)
    held = parts(ElasticSlots(arena.supplies[STATE]))
    yield ElasticMemory(held, arena, SPEC, Telemetry(arena, held.account.counts, 0.0, None))
    arena.pooled.close()
    driver.close()


def use_up(memory: Memory) -> list[torch.Tensor]:
    taken = []
    while (slot := memory.states.alloc(1)) is not None:
        taken.append(slot)
    return taken


def test_a_saved_state_keeps_no_list_of_free_slots_alive() -> None:
    """The allocator hands out views of its list, and makes a new list whenever a slot comes back."""
    free = torch.arange(1000)
    allocator = SimpleNamespace(alloc=lambda count: free[:count])
    record = Tracked()
    assert CheckpointSlots(allocator).reserve(record, 64, 64)
    (checkpoint,) = record.planned
    assert checkpoint.slot.tolist() == [0]
    assert checkpoint.slot.untyped_storage().nbytes() == 8


def test_a_state_that_is_free_is_had_without_evicting(memory: Memory) -> None:
    assert memory.has_state()
    assert memory.ensure_states(2)
    use_up(memory)
    assert not memory.has_state()
    assert not memory.ensure_states(1), "nothing can leave"
    assert memory.account.counts["reclaimed"] == 0


@pytest.mark.parametrize("memory", ["static"], indirect=True)
def test_a_slot_whose_memory_is_that_of_kv_is_not_free(memory: Memory) -> None:
    """SGLang's unified pool counts slots and memory apart: what has no contest would be refused once memory is full."""
    assert memory.free_states() == 8
    memory.states.beside = 8
    assert memory.free_states() == 0
    assert not memory.spare_states()
    assert not memory.slots.reserve(Tracked(), 64, 64)
    asked: list[int] = []
    memory.victims.weakest = lambda core, pool, left, count, now: asked.append(count) or list(left)
    memory.victims.chosen = []
    assert memory.contest({1: None, 2: None}) == set()  # type: ignore[dict-item]
    assert asked == [2]


def test_what_can_be_evicted_leaves_before_a_checkpoint_in_the_making_is_taken_back(memory: Memory) -> None:
    record = Tracked()
    assert memory.slots.reserve(record, 64, 64)
    memory.cache.evictable = use_up(memory)
    before = len(memory.cache.evictable)
    assert memory.ensure_states(1)
    assert 0 < before - len(memory.cache.evictable) < before, "as many as it takes: elastic memory moves by granules"
    assert len(memory.slots) == 1
    memory.cache.evictable.clear()
    use_up(memory)
    assert memory.ensure_states(1)
    assert (len(memory.slots), memory.account.counts["reclaimed"]) == (0, 1)
    assert record.planned[0].slot is None, "it is not saved any more"


def test_only_pools_of_fixed_sizes_tell_of_each_eviction_what_stays(memory: Memory) -> None:
    memory.cache.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 100)
    memory.leaving(PoolKind.STATES, 1)
    told: Any = memory.decisions
    assert told.fits == ([] if memory.shared else [((0, 100), {})])


def waiting(memory: Memory, row: int | None) -> Any:
    """A turn of a session that was matched; `row` of KV is its session's."""
    slot = memory.states.alloc(1)
    assert slot is not None
    kv = SimpleNamespace(mamba_pool_idx=slot, mamba_cow_src_index=3, mamba_needs_clear=True, req_pool_idx=row)
    return SimpleNamespace(kv=kv, session=SimpleNamespace(streaming=row is not None))


@pytest.mark.parametrize("has_room", [False, True])
def test_what_waits_keeps_no_slot(memory: Memory, monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    """SGLang leaves it to a turn of a session, whose next match may find nothing to copy into it."""
    monkeypatch.setattr(memory, "room_for", lambda *_: has_room)
    monkeypatch.setattr(memory, "restoring", lambda *_: nullcontext())
    coordinator = SimpleNamespace(memory=memory, composer=None, account=memory.account)
    monkeypatch.setattr(hooks, "coordinator_of", lambda _: coordinator)
    before, req = memory.states.available_size(), waiting(memory, row=None)
    adder = SimpleNamespace(tree_cache=None, page_size=1, running_batch=None, can_run_list=[])
    hooks.admit(lambda *_: None, adder, req)  # who waits for KV is not admitted either
    assert (req.kv.mamba_pool_idx, req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear) == (None, None, False)
    assert memory.states.available_size() == before
    assert memory.account.counts["waited_for_states"] == (not has_room)
    kept, admitted = waiting(memory, row=4), waiting(memory, row=None)
    adder.can_run_list.append(admitted)
    for req in (kept, admitted):
        hooks.admit(lambda *_: None, adder, req)
    assert kept.kv.mamba_pool_idx is not None, "its session has it from an earlier turn"
    assert admitted.kv.mamba_pool_idx is not None


def test_elastic_memory_is_refused_where_pools_or_cache_are_not_ours() -> None:
    context = SimpleNamespace(
        disable_radix_cache=True, params=SimpleNamespace(token_to_kv_pool_allocator=Slots(1)), tp_rank=0
    )
    with pytest.raises(ConfigError, match=r"add --hybrid-memory static: SGLang's own cache"):
        build.build(context, HybridConfig(memory="elastic"), SPEC)
    with pytest.raises(ConfigError, match="add --hybrid-memory static: Slots"):
        elastic.build(context, HybridConfig(memory="elastic"), SPEC, parts=None)  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match="Slots"):
        memory_of(Slots(1))
