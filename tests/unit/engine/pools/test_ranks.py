"""Ranks of one server: whatever differs between them, they hold the same pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.engine.pools.ranks import Group
from sglang_hybrid.memory.sizing import KV, STATE
from tests.clock import LogicalClock
from tests.unit.engine.pools.arenas import Copies, FailingHost, opened

KINDS = st.sampled_from([KV, STATE])
RANK = st.integers(0, 1)
COUNTS = st.integers(1, 40)


class Meeting:
    """Two ranks as two threads: both ask, both get the answer of both."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=600)
        self._said: dict[int, tuple[bool, tuple[int, ...]]] = {}

    def agree(self, success: bool, account: Sequence[int]) -> bool:
        self._said[threading.get_ident()] = success, tuple(account)
        self._barrier.wait()
        said = list(self._said.values())
        if self._barrier.wait() == 0:
            self._said.clear()
        self._barrier.wait()
        assert len({account for _, account in said}) == 1
        return all(success for success, _ in said)


class Ranks(RuleBasedStateMachine):
    """Both ranks do the same; one of them settles, is asked, or fails while the other does not."""

    late = False  # whether freed ids reach the host of each rank some time later

    def __init__(self) -> None:
        super().__init__()
        meeting = Meeting()
        self.threads = ThreadPoolExecutor(2)
        self.times = [LogicalClock(), LogicalClock()]
        self.copies = [Copies(), Copies()]
        both = [
            opened(
                FailingHost,
                time.now,
                total_bytes=1 << 20,
                ranks=meeting,
                begin_copy=copies if self.late else None,
            )
            for time, copies in zip(self.times, self.copies, strict=True)
        ]
        self.arenas = [arena for arena, _ in both]
        self.drivers = [driver for _, driver in both]
        self.taken: dict[str, list[list[torch.Tensor]]] = {KV: [], STATE: []}

    def both(self, act: Callable[[int, Arena], Any]) -> list[Any]:
        return list(self.threads.map(act, range(2), self.arenas))

    @rule(name=KINDS, count=COUNTS, failing=st.sampled_from([None, None, 0, 1]))
    def take(self, name: str, count: int, failing: int | None) -> None:
        if failing is not None:
            self.drivers[failing].failing = True
        pages = self.both(lambda _, arena: arena.supplies[name].take(count))
        for driver in self.drivers:
            driver.failing = False
        assert (pages[0] is None) == (pages[1] is None)
        if pages[0] is not None:
            assert torch.equal(*pages)
            self.taken[name].append(pages)

    @rule(name=KINDS, at=st.integers(0, 1 << 20), step=st.integers(1, 3))
    def give(self, name: str, at: int, step: int) -> None:
        """All of what was taken together, or every second or third page of it."""
        if not self.taken[name]:
            return
        pages = self.taken[name].pop(at % len(self.taken[name]))
        self.both(lambda rank, arena: arena.supplies[name].give(pages[rank][::step]))
        rest = torch.ones(len(pages[0]), dtype=torch.bool)
        rest[::step] = False
        if rest.any():
            self.taken[name].append([each[rest] for each in pages])

    @rule(pages=COUNTS, states=COUNTS, failing=st.sampled_from([None, None, 0, 1]))
    def reserve(self, pages: int, states: int, failing: int | None) -> None:
        self.both(lambda _, arena: arena.release_held())
        assert len(set(self.both(lambda _, arena: arena.shortfall({KV: pages, STATE: states})))) == 1
        if failing is not None:
            self.drivers[failing].failing = True
        held = self.both(lambda _, arena: arena.reserve({KV: pages, STATE: states}))
        for driver in self.drivers:
            driver.failing = False
        assert held[0] == held[1]

    @rule(rank=RANK, seconds=st.sampled_from([0.0, 0.6, 2.0]))
    def settle(self, rank: int, seconds: float) -> None:
        self.times[rank].advance(seconds)
        self.arenas[rank].settle()

    @rule(rank=RANK, name=KINDS)
    def ask(self, rank: int, name: str) -> None:
        """A rank that logs asks more often than the others."""
        supply = self.arenas[rank].supplies[name]
        assert supply.available >= supply.at_hand - len(supply.held) >= 0

    @rule(rank=RANK, count=st.integers(1, 4))
    def arrive(self, rank: int, count: int) -> None:
        self.copies[rank].arrive(count)

    @rule()
    def begin_pass(self) -> None:
        self.both(lambda _, arena: arena.used())

    @rule(rank=RANK)
    def start_prefault(self, rank: int) -> None:
        self.arenas[rank].pooled.prefault(8)

    @invariant()
    def the_same_pages_are_had(self) -> None:
        for name in (KV, STATE):
            one, other = (arena.supplies[name] for arena in self.arenas)
            assert one.taken == other.taken
            assert one.held.tolist() == other.held.tolist()
            assert one.available == other.available
        for arena in self.arenas:
            arena.check()

    def teardown(self) -> None:
        self.threads.shutdown()
        for arena, driver in zip(self.arenas, self.drivers, strict=True):
            arena.pooled.close()
            driver.close()


class LateRanks(Ranks):
    """The same on devices, whose copies end at other times on each rank."""

    late = True


TestLateRanks = LateRanks.TestCase
TestLateRanks.settings = settings(max_examples=40, stateful_step_count=30)
TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=40, stateful_step_count=30)


def _ask(rank: int, store: str, accounts: list[list[int]]) -> list[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = Group(torch.distributed.group.WORLD)
    said: list[Any] = [group.least(10 - rank), group.agree(True, [7]), group.agree(rank == 0, [7])]
    for question in (lambda: group.agree(True, accounts[rank]), lambda: group.require_same("size", accounts[rank])):
        try:
            said.append(question())
        except (ConfigError, InvariantError) as error:
            said.append(f"{type(error).__name__}: {error}")
    torch.distributed.destroy_process_group()
    return said


def test_processes_agree(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        found = pool.starmap(_ask, [(rank, str(tmp_path / "store"), [[3, 4], [3, 5]]) for rank in range(2)], 1)
    for rank, said in enumerate(found):
        assert said[:3] == [9, True, False]
        assert said[3].startswith("InvariantError: ranks disagree about memory")
        assert said[4] == f"ConfigError: give every rank the same size, they have [3, 4] to [3, 5]: {[3, 4 + rank]}"


def test_a_rank_that_gave_memory_back_draws_the_same_columns() -> None:
    ranks = Ranks()
    size = ranks.arenas[0].sizing.kv_column_tokens // 4
    counts = [size - 1, size, size, size]  # a page is pinned
    columns = [ranks.both(lambda _, arena, count=count: arena.supplies[KV].take(count)) for count in counts]
    for gone, back in ((1, True), (2, False)):  # rank 0 unmaps the first of them, neither the second
        ranks.both(lambda rank, arena, gone=gone: arena.supplies[KV].give(columns[gone][rank]))
        ranks.both(lambda _, arena: arena.tidy())
        if back:
            ranks.settle(0, 0.0)
            ranks.settle(0, 2.0)
    assert [bytes(arena.supplies[KV].pool.columns.state).count(1) for arena in ranks.arenas] == [1, 2], "warm columns"
    pages = ranks.both(lambda _, arena: arena.supplies[KV].take(size // 2))
    assert torch.equal(*pages)
    ranks.teardown()


def test_a_rank_counts_a_copy_two_passes_later_whenever_it_ended() -> None:
    ranks = LateRanks()
    pages = ranks.both(lambda _, arena: arena.supplies[KV].take(arena.supplies[KV].available))
    ranks.both(lambda rank, arena: arena.supplies[KV].give(pages[rank]))
    ranks.copies[0].arrive(1)
    available = [ranks.both(lambda _, arena: arena.supplies[KV].available)]
    for _ in range(2):
        ranks.begin_pass()
        available.append(ranks.both(lambda _, arena: arena.supplies[KV].available))
    assert available == [[0, 0], [0, 0], [len(pages[0])] * 2]
    assert [copies.waited for copies in ranks.copies] == [0, 1]
    ranks.teardown()
