"""A machine that gives less memory than the budget, for others use it too: the cache leaves, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.engine.pools.memory import ElasticMemory
from sglang_hybrid.memory.claims import Claims
from sglang_hybrid.memory.sizing import KV, STATE
from tests.clock import LogicalClock
from tests.unit.engine.pools.arenas import opened


class Short(HostDriver):
    """Others have all but `most` granules."""

    most, made = 1 << 30, 0

    def create(self, size: int) -> int:
        if self.made >= self.most:
            raise PoolExhausted("somebody else has it")
        handle = super().create(size)
        self.made += 1
        return handle

    def release(self, handle: int, size: int) -> None:
        super().release(handle, size)
        self.made -= 1


class Cache(Claims):
    """Keeps what was computed, oldest first, until it has to leave."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.arena = arena
        self.kept: list[tuple[str, torch.Tensor]] = []

    def evict_one(self, kinds: tuple[str, ...]) -> int:
        for at, (kind, pages) in enumerate(self.kept):
            if kind in kinds:
                del self.kept[at]
                self.arena.supplies[kind].give(pages)
                return len(pages) * 1024
        return 0

    def evictable(self) -> dict[str, list[tuple[int, int]]]:
        found = {}
        for kind in (KV, STATE):
            pages = [each for of, each in self.kept if of == kind]
            pool = self.arena.supplies[kind].pool
            found[kind] = list(pool.count_by_column(torch.cat(pages).numpy())) if pages else []
        return found

    def evictable_states(self) -> int:
        return sum(len(pages) for kind, pages in self.kept if kind == STATE)

    def held(self) -> tuple[int, int]:
        return sum(len(pages) for kind, pages in self.kept if kind == KV), self.evictable_states()

    def leave(self, share: float) -> None:
        """Nothing is priced here."""

    def serve(self, pages: int) -> bool:
        """Admit a request, and keep what it leaves; whether it was admitted."""
        if not self.admit(pages, 1):
            return False
        self.kept += [(KV, self.take(KV, pages)), (STATE, self.take(STATE, 1))]
        self.nothing_promised()
        self.arena.release_held()
        return True

    def take(self, kind: str, count: int) -> torch.Tensor:
        pages = self.arena.supplies[kind].take(count)
        assert pages is not None, "it was held"
        return pages


@pytest.fixture
def cache() -> Iterator[Cache]:
    arena, driver = opened(Short, LogicalClock().now, total_bytes=8 << 20)
    driver.most = int(arena.budget.total * 0.9)  # type: ignore[attr-defined]
    yield Cache(arena)
    arena.budget.check()
    arena.pooled.close()
    driver.close()


def test_requests_are_admitted_for_ever_and_the_cache_leaves(cache: Cache) -> None:
    pages = cache.arena.supplies[KV].pool.layout.column_pages // 3
    for _ in range(1000):
        assert cache.serve(pages)
    assert 0 < cache.arena.budget.mapped < cache.arena.budget.total, "the machine gave no more"
    assert cache.arena.budget.limit == cache.arena.budget.total, "and is asked again the next time"


def test_a_running_request_grows(cache: Cache) -> None:
    column = cache.arena.supplies[KV].pool.layout.column_pages
    while len(cache.kept) < 2000 and cache.arena.budget.mapped < cache.arena.budget.total * 0.88:
        assert cache.serve(column // 3)
    running: list[torch.Tensor] = []
    while cache.secure_decode(column):
        running.append(cache.take(KV, column))
    assert not cache.kept, "all of the cache left before"
    granules = cache.arena.sizing.kv_column_granules
    assert len(running) * granules > cache.arena.budget.total * 0.8


def test_idle_memory_of_the_other_kind_is_used_before_anything_leaves(cache: Cache) -> None:
    column = cache.arena.supplies[KV].pool.layout.column_pages
    while cache.serve(column // 3) and cache.arena.budget.mapped < cache.arena.budget.total * 0.88:
        continue
    for kind, pages in cache.kept:
        if kind == STATE:
            cache.arena.supplies[STATE].give(pages)
    cache.kept = [(kind, pages) for kind, pages in cache.kept if kind == KV]
    cache.arena.sort(wait=True)
    before, idle = len(cache.kept), cache.arena.budget.free
    assert idle > 4 * cache.arena.sizing.kv_column_granules
    assert cache.admit(3 * column, 0)
    assert len(cache.kept) == before


def test_checkpoints_in_the_making_leave_before_a_running_request_does(cache: Cache) -> None:
    """The tree has not got them yet, so that they cannot be evicted."""
    column, states = cache.arena.supplies[KV].pool.layout.column_pages, cache.arena.sizing.states_per_column
    planned: list[torch.Tensor] = []
    while (slot := cache.arena.supplies[STATE].take(1)) is not None:
        planned.append(slot)

    class Slots:
        def reclaim(self, count: int) -> int:
            taken, planned[:] = planned[:count], planned[count:]
            for each in taken:
                cache.arena.supplies[STATE].give(each)
            return len(taken)

    memory, before = elastic(cache), len(planned)
    memory.slots = Slots()  # type: ignore[assignment]
    assert memory.secure_decode(column)
    assert 0 < before - len(planned) <= 4 * states


def test_what_is_being_copied_leaves_before_a_running_request_does(cache: Cache) -> None:
    """The tree keeps it locked until it is in host memory."""
    column, copying = cache.arena.supplies[KV].pool.layout.column_pages, [(KV, cache.take(KV, 1))]
    while (pages := cache.arena.supplies[KV].take(column)) is not None:
        copying.append((KV, pages))
    while (slot := cache.arena.supplies[STATE].take(1)) is not None:
        copying.append((STATE, slot))
    memory = elastic(cache)
    memory.slots = SimpleNamespace(reclaim=lambda count: 0)  # type: ignore[assignment]
    assert not memory.secure_decode(column)

    def copied() -> bool:
        cache.kept, copying[:] = cache.kept + copying, []
        return bool(cache.kept)

    memory.tier = SimpleNamespace(copied=copied)  # type: ignore[assignment]
    assert memory.secure_decode(column)


def elastic(cache: Cache) -> ElasticMemory:
    """The product's, over what `cache` keeps."""
    memory = object.__new__(ElasticMemory)
    memory.arena, memory.holdings, memory.tier = cache.arena, cache.arena, None  # type: ignore[assignment]
    memory.account, memory._composer = SimpleNamespace(event=lambda *_: None), None  # type: ignore[assignment]
    memory.evict_for = cache.evict_for  # type: ignore[method-assign]
    return memory


def test_what_never_fits_is_refused_and_evicts_nothing(cache: Cache) -> None:
    column = cache.arena.supplies[KV].pool.layout.column_pages
    while cache.serve(column // 3) and cache.arena.budget.mapped < cache.arena.budget.total * 0.88:
        continue
    running = cache.take(KV, 1)
    before = len(cache.kept)
    assert not cache.admit(cache.arena.budget.total // cache.arena.sizing.kv_column_granules * column, 0)
    assert len(cache.kept) == before
    cache.arena.supplies[KV].give(running)
