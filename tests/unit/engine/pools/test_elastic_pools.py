"""Supplies and arena against real host memory: what SGLang takes and frees, checked after every random step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.device.tensors import plane_tensors
from sglang_hybrid.engine.pools import hooks
from sglang_hybrid.engine.pools.copies import FromDevice, send
from sglang_hybrid.memory.sizing import KV, STATE
from tests.clock import LogicalClock
from tests.unit.engine.pools.arenas import Copies, FailingHost, opened

COUNTS = st.integers(1, 40)


class Arenas(RuleBasedStateMachine):
    """Takes, gives, reserves, memory failures and returns of both kinds."""

    late = False  # whether freed ids reach the host some time later

    def __init__(self) -> None:
        super().__init__()
        self.time = LogicalClock()
        self.copies = Copies()
        self.arena, self.driver = opened(
            FailingHost, self.time.now, total_bytes=1 << 20, begin_copy=self.copies if self.late else None
        )
        self.taken: dict[str, list[torch.Tensor]] = {KV: [], STATE: []}

    @rule(name=st.sampled_from([KV, STATE]), count=COUNTS, failing=st.booleans())
    def take(self, name: str, count: int, failing: bool) -> None:
        supply = self.arena.supplies[name]
        could = supply.available
        self.driver.failing = failing
        pages = supply.take(count)
        self.driver.failing = False
        if pages is not None:
            assert len(pages) == count
            self.taken[name].append(pages)
        else:
            assert failing or could < count, "what is available can be had"

    @rule(name=st.sampled_from([KV, STATE]), which=st.randoms(use_true_random=False))
    def give(self, name: str, which: object) -> None:
        if self.taken[name]:
            at = which.randrange(len(self.taken[name]))  # type: ignore[attr-defined]
            self.arena.supplies[name].give(self.taken[name].pop(at))

    @rule(pages=COUNTS, states=COUNTS, failing=st.booleans())
    def reserve(self, pages: int, states: int, failing: bool) -> None:
        self.arena.release_held()
        fits = self.arena.shortfall({KV: pages, STATE: states}) == 0
        self.driver.failing = failing
        held = self.arena.reserve({KV: pages, STATE: states})
        self.driver.failing = False
        assert held == fits or failing
        sizes = [len(self.arena.supplies[name].held) for name in (KV, STATE)]
        assert sizes == ([pages, states] if held else [0, 0]), "both or neither"

    @rule(count=st.integers(1, 4))
    def arrive(self, count: int) -> None:
        self.copies.arrive(count)

    @rule(seconds=st.sampled_from([0.0, 0.6, 2.0]))
    def settle(self, seconds: float) -> None:
        self.time.advance(seconds)
        self.arena.settle()

    @rule()
    def release(self) -> None:
        self.arena.release()
        self.arena.tidy()
        budget = self.arena.budget
        assert self.arena.pooled.committed_bytes == budget.used * budget.granule_bytes

    @rule(name=st.sampled_from([KV, STATE]))
    def clear(self, name: str) -> None:
        self.arena.supplies[name].clear()
        self.taken[name] = []

    @invariant()
    def the_account_adds_up(self) -> None:
        self.arena.check()
        for name, supply in self.arena.supplies.items():
            pages = torch.cat(self.taken[name]) if self.taken[name] else torch.empty(0, dtype=torch.int64)
            assert supply.taken == len(pages)
            assert len(np.unique(pages.numpy())) == len(pages)
            assert 0 not in pages
            assert self.arena.possible({name: supply.available}, {})

    def teardown(self) -> None:
        self.arena.pooled.close()
        self.driver.close()


class LateArenas(Arenas):
    """The same on a device."""

    late = True


TestLateArenas = LateArenas.TestCase
TestLateArenas.settings = settings(max_examples=40, stateful_step_count=30)
TestArenas = Arenas.TestCase
TestArenas.settings = settings(max_examples=40, stateful_step_count=30)


def test_pages_that_could_be_evicted_count_column_by_column() -> None:
    arena, driver = opened(HostDriver, lambda: 0.0, 1, 1 << 20)
    sizing = arena.sizing
    tokens = arena.supplies[KV].take(arena.supplies[KV].available)
    assert tokens is not None
    assert arena.supplies[STATE].take(arena.supplies[STATE].available) is not None
    need = {STATE: sizing.states_per_column}
    column = sizing.kv_column_tokens
    enough = -(-sizing.state_column_granules // sizing.kv_column_granules)
    whole = torch.arange(column, (1 + enough) * column)
    assert not arena.possible(need, {})
    by_column = arena.supplies[KV].pool.count_by_column
    assert not arena.possible(need, {KV: by_column(tokens[::2].numpy())}), "every second token frees no granule"
    assert arena.possible(need, {KV: by_column(whole.numpy())})
    arena.supplies[KV].give(whole)
    assert arena.shortfall(need) == 0
    assert arena.reserve(need)
    arena.check()
    arena.pooled.close()
    driver.close()


def test_what_was_held_and_given_back_does_not_count_as_in_use() -> None:
    arena, driver = opened(HostDriver, lambda: 0.0, 4, 1 << 20)
    states = arena.supplies[STATE].available
    assert arena.reserve({STATE: states})
    arena.release_held()
    tokens = arena.sizing.kv_column_tokens
    assert arena.shortfall({KV: tokens}) == 0
    assert arena.reserve({KV: tokens})
    arena.pooled.close()
    driver.close()


class Ahead(HostDriver):
    """Host memory that says which thread created each granule."""

    def __init__(self, parking_bytes: int, granule_bytes: int) -> None:
        super().__init__(parking_bytes, granule_bytes)
        self.creators: list[str] = []

    def create(self, size_bytes: int) -> int:
        self.creators.append(threading.current_thread().name)
        return super().create(size_bytes)


def test_memory_made_ahead_is_used_and_goes_when_nobody_comes() -> None:
    time = LogicalClock()
    arena, driver = opened(Ahead, time.now)
    arena.start_prefault()
    assert arena.prefaulter is not None
    arena.prefaulter.wait()
    ahead = arena.sizing.total // 8
    assert arena.pooled.at_hand == ahead
    driver.creators.clear()
    arena.used()
    assert arena.supplies[STATE].take(2 * arena.sizing.states_per_column) is not None
    arena.prefaulter.wait()
    assert "MainThread" not in driver.creators
    arena.settle()
    assert arena.pooled.at_hand > 0, "somebody worked a moment ago"
    time.advance(1.5)
    while arena.settle():
        arena.check()
    assert arena.pooled.at_hand == 0
    assert arena.pooled.committed_bytes == arena.budget.used * arena.sizing.granule_bytes
    arena.prefaulter.stop()
    arena.pooled.close()
    driver.close()


def test_idle_memory_goes_in_steps_that_nobody_has_to_wait_for() -> None:
    time = LogicalClock()
    arena, driver = opened(HostDriver, time.now)
    states = arena.supplies[STATE]
    states.give(states.take(states.available))
    arena.settle()
    time.advance(2.0)
    before, steps = arena.pooled.committed_bytes, 1
    while arena.settle():
        steps += 1
        assert before - arena.pooled.committed_bytes <= 64 * arena.sizing.granule_bytes
        before = arena.pooled.committed_bytes
    assert steps > arena.sizing.total // 64
    assert arena.pooled.committed_bytes == arena.budget.used * arena.sizing.granule_bytes
    arena.pooled.close()
    driver.close()


def test_ranks_that_see_the_same_calls_answer_alike_whoever_made_the_memory() -> None:
    """What tensor parallelism needs first; memory that fails on one rank alone is why it is refused all the same."""
    time = LogicalClock()
    (one, driver_one), (two, driver_two) = opened(Ahead, time.now), opened(FailingHost, time.now)
    one.start_prefault()
    rng, taken = np.random.default_rng(5), []
    for _ in range(400):
        name, count = (KV, STATE)[rng.integers(2)], int(rng.integers(1, 60))
        if taken and rng.random() < 0.45:
            name, pages = taken.pop(int(rng.integers(len(taken))))
            one.supplies[name].give(pages.clone())
            two.supplies[name].give(pages.clone())
        elif rng.random() < 0.2:
            time.advance(0.7)
            assert one.shortfall({KV: count, STATE: 3}) == two.shortfall({KV: count, STATE: 3})
            assert one.reserve({KV: count, STATE: 3}) == two.reserve({KV: count, STATE: 3})
            one.release_held()
            two.release_held()
        else:
            first, second = one.supplies[name].take(count), two.supplies[name].take(count)
            assert (first is None) == (second is None)
            if first is not None:
                assert torch.equal(first, second)
                taken.append((name, first))
        assert [s.available for s in one.supplies.values()] == [s.available for s in two.supplies.values()]
    two.release()
    driver_two.failing = True
    wanted = {STATE: 3 * one.sizing.states_per_column}
    assert (one.reserve(wanted), two.reserve(wanted)) == (True, False), "one rank would admit, the other wait"
    assert one.prefaulter is not None
    one.prefaulter.stop()
    for arena, driver in ((one, driver_one), (two, driver_two)):
        arena.check()
        arena.pooled.close()
        driver.close()


def test_kv_over_memory_of_former_states_reads_zero() -> None:
    """NaN of a state would reach attention, which multiplies what it masks by zero."""
    arena, driver = opened(HostDriver, lambda: 0.0, 1, 1 << 20)
    states, tokens = arena.supplies[STATE], arena.supplies[KV]
    layouts = {STATE: arena.sizing.state_layout, KV: arena.sizing.kv_layout}
    floats, first = {}, 0
    for name in (STATE, KV):
        (planes,) = layouts[name].planes
        width = planes.slot_bytes // 4
        floats[name] = plane_tensors(
            arena.pooled, layouts[name], planes, first, (width,), torch.float32, torch.device("cpu")
        )
        first += planes.count
    taken = states.take(states.available)
    assert taken is not None
    for plane in floats[STATE]:
        plane[taken] = torch.nan
    states.give(taken)
    drawn = tokens.take(tokens.available)
    assert drawn is not None
    assert arena.budget.transfers > 0, "granules changed kind"
    for plane in floats[KV]:
        assert not plane[0].any()
        assert torch.equal(plane[drawn], torch.zeros_like(plane[drawn]))
    arena.pooled.close()
    driver.close()


def test_ids_that_are_still_copied_are_waited_for_only_where_pages_are_short() -> None:
    copies = Copies()
    arena, driver = opened(HostDriver, lambda: 0.0, 1, 1 << 20, begin_copy=copies)
    tokens = arena.supplies[KV]
    every = tokens.available
    taken = tokens.take(every)
    assert taken is not None
    half = every // 2
    tokens.give(taken[:half])
    assert (tokens.available, tokens.at_hand, tokens.taken) == (0, 0, every - half)
    arena.settle()
    arena.check()
    assert copies.waited == 0
    copies.arrive(1)
    assert tokens.available == half, "what arrived counts"
    assert tokens.reserve(half)
    tokens.give(taken[half:])
    assert (copies.waited, tokens.available) == (0, half)
    assert arena.shortfall({KV: half}) == 0
    assert copies.waited == 0, "what is held is enough"
    assert tokens.reserve(every)
    assert copies.waited == 1
    arena.pooled.close()
    driver.close()


def test_a_look_for_leaks_finds_one_story_though_freed_ids_arrive_while_it_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = Copies()
    arena, driver = opened(HostDriver, lambda: 0.0, 1, 1 << 20, begin_copy=copies)
    tokens, states = arena.supplies[KV], arena.supplies[STATE]
    pages = tokens.take(tokens.available)
    assert pages is not None
    tokens.give(pages)  # the last request ended; its ids are under way
    memory = SimpleNamespace(arena=arena, just_refused=lambda: False, telemetry=SimpleNamespace(tick=lambda: None))
    monkeypatch.setattr(hooks, "memory_of", lambda _: memory)
    hooks.idle(SimpleNamespace(tree_cache=None))
    read = {supply: supply.available for supply in (tokens, states)}
    copies.arrive(len(copies.begun))
    for supply, available in read.items():
        assert supply.taken == 0
        assert supply.taken + supply.available == available > 0
    arena.pooled.close()
    driver.close()


def test_a_copy_to_the_host_waits_for_the_scheduler_and_not_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of calls on a GPU; benchmarks/memory/gpu.py runs them on one."""
    log: list[str] = []
    event = SimpleNamespace(query=lambda: False, synchronize=lambda: log.append("synchronize"))
    stream = SimpleNamespace(
        wait_stream=lambda other: log.append(f"wait for {other}"),
        record_event=lambda: log.append("record") or event,
    )

    @contextmanager
    def on(given: object) -> Iterator[None]:
        assert given is stream
        log.append("enter")
        yield
        log.append("leave")

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the scheduler's")
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: log.append("pin") or empty(shape, dtype=dtype))
    copy = FromDevice(torch.tensor([5, 3, 8]), stream)
    assert log == ["wait for the scheduler's", "pin", "enter", "leave", "record"]
    assert not copy.done()
    assert copy.ids().tolist() == [5, 3, 8]
    assert log[-1] == "synchronize"


def test_ids_go_to_a_device_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from the array itself, of which the pool goes on to use the rest."""
    staged: list[torch.Tensor] = []
    empty = torch.empty

    def pinned(count: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        staged.append(empty(count, dtype=dtype))
        return staged[-1]

    monkeypatch.setattr(torch, "empty", pinned)
    ids = np.array([4, 9, 2])
    assert send(ids, torch.device("meta")).shape == (3,)
    assert staged[0].tolist() == [4, 9, 2]
    on_host = send(ids, torch.device("cpu"))
    ids[:] = 0
    assert on_host.tolist() == staged[0].tolist() == [4, 9, 2]


def test_windows_are_copied_by_no_addresses_that_were_kept() -> None:
    """SGLang's fused kernels know the tensors that a pool was made with, which are freed here (0.5.23, CUDA)."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    from sglang_hybrid.engine.pools.states import ElasticStates

    assert "_conv_fuse_ok" in vars(MambaPool), "by another name they would be back"
    assert ElasticStates._conv_fuse_ok is False
