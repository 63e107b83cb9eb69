"""Segments, KV and states in one budget: the least valuable byte leaves, and nothing that can go keeps anybody out."""

from __future__ import annotations

import random

import pytest

from sglang_hybrid.memory.sizing import KV, SEGMENT, STATE
from sglang_hybrid.segment.index import Entry
from tests.unit.segment.shared import GRANULE, TOKENS, Shared


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") * 4


def keep(shared: Shared, number: int, tokens: int = 12) -> Entry | None:
    """An entry that nobody relies on any more, None if it was refused or is there already."""
    if shared.index.find(key(number)) is not None:
        return None
    mark = shared.index.sight(key(number), shared.now)
    entry = shared.index.admit(key(number), tokens, mark, shared.now)
    if entry is not None:
        entry.making = False
        shared.index.unpin(entry)
    return entry


def filled(worth: float, **options: int) -> Shared:
    """A budget full of KV of which a byte is worth so much."""
    shared = Shared(**options)
    while shared.holdings.supplies[KV].available:
        assert shared.put(KV, 1, worth) is not None
    return shared


@pytest.mark.parametrize("block_bytes", [32, 64, 128])
def test_a_segment_takes_memory_of_what_is_worth_less(block_bytes: int) -> None:
    shared = filled(0.0, block_bytes=block_bytes)
    entry = keep(shared, 1)
    shared.check()
    assert entry is not None
    assert {*shared.left} == {0.0}, "only what it had to displace, and no more than a column of KV too much"
    needed = entry.tokens // TOKENS + 2
    assert len(shared.left) * 32 <= needed * block_bytes + 4 * GRANULE


def test_a_segment_that_is_worth_less_is_refused_and_nothing_goes() -> None:
    shared = filled(1e30)
    before = len(shared.nodes)
    assert keep(shared, 1) is None
    shared.check()
    assert (len(shared.nodes), shared.left, shared.index.counts.evicted) == (before, [], 0)


def test_segments_shrink_to_nothing_for_one_large_request() -> None:
    shared = Shared()
    kept = [keep(shared, number) for number in range(12)]
    assert any(each is not None for each in kept)
    assert shared.index.blocks.taken
    kv = shared.holdings.supplies[KV]
    total = kv.pool.layout.pages - kv.pool.layout.pinned_pages
    largest = total - 8  # beside the columns of both padding slots
    shared.clear_for(largest, 0)
    assert shared.secure({KV: largest})
    assert len(shared.index) == 0
    shared.holdings.release_held()
    shared.check()


def test_what_a_request_relies_on_stays() -> None:
    shared = Shared()
    mark = shared.index.sight(key(1), 0.0)
    relied = shared.index.admit(key(1), 12, mark, 0.0)
    assert relied is not None
    assert keep(shared, 2) is not None
    kv = shared.holdings.supplies[KV]
    assert not shared.secure({KV: kv.pool.layout.pages - 5}), "all but what is pinned would not be enough"
    assert len(shared.index) == 2, "and so nothing went for it"
    shared.clear_for(kv.pool.layout.pages - 5, 0)
    assert [entry.key for entry in shared.index] == [key(1)]
    assert not {relied.block, *shared.index.blocks.kv.blocks_of(relied.slots)} & {*shared.index.unpinned_blocks()}
    shared.index.drop(relied)
    assert shared.index.blocks.taken, "it was dropped, and somebody relies on it"
    shared.index.unpin(relied)
    assert not shared.index.blocks.taken
    shared.check()


def test_blocks_may_have_fewer_addresses_than_there_is_memory() -> None:
    """A limit for segments is kept with KV that is worth nothing beside them: then entries go for each other."""
    shared = Shared(limit=4 * GRANULE)
    shared.put(KV, 8, 0.0)
    for number in range(10):
        keep(shared, number)
        shared.check()
        assert len(shared.index.blocks.taken) <= shared.index.blocks.count == 8
    assert shared.left == []
    assert shared.index.counts.evicted > 0


@pytest.mark.parametrize("seed", range(6))
def test_the_least_valuable_byte_leaves(seed: int) -> None:
    rng = random.Random(seed)
    granules, transitions = rng.randint(16, 60), rng.choice((0, 3, 6))
    shared = Shared(granules, block_bytes=rng.choice((32, 64, 128)), transitions=transitions)
    relied: list[Entry] = []
    for _ in range(120):
        shared.now += rng.choice((0.0, 0.1, 30.0))
        kinds = rng.choice(("kv", "state", "segment", "segment", "read", "pin", "drop", "settle"))
        shared.left.clear()
        if kinds in (KV, STATE):
            shared.put(kinds, rng.randint(1, 12 if kinds == KV else 2), rng.choice((0.0, 10.0, 1e3, 1e6, 1e30)))
            if shared.left:
                stays = shared.stays()[: -1 if shared.nodes else None]
                assert max(shared.left) <= min(stays, default=max(shared.left))
        elif kinds == SEGMENT:
            keep(shared, rng.randint(0, 30), rng.randint(1, 40))
        elif kinds == "read" and shared.nodes:
            node = rng.choice(shared.nodes)
            node.read = not node.read
        elif kinds == "pin" and len(shared.index):
            entry = rng.choice(list(shared.index))
            shared.index.pin(entry)
            relied.append(entry)
        elif kinds == "drop" and relied:
            shared.index.unpin(relied.pop(rng.randrange(len(relied))))
        elif kinds == "settle" and len(shared.index):
            entry = rng.choice(list(shared.index))
            shared.index.settle(entry, rng.randint(0, transitions))
        shared.check()
    for entry in relied:
        shared.index.unpin(entry)
    shared.index.clear()
    shared.check()
    assert shared.holdings.supplies[SEGMENT].taken == 0
