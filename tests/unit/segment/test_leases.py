"""What keeps entries until the passes over them have run."""

from __future__ import annotations

import pytest

from sglang_hybrid.segment.index import Entry, SegmentIndex
from sglang_hybrid.segment.leases import Leases
from tests.unit.segment.played import an_index


def kept(index: SegmentIndex, number: int) -> Entry:
    key = number.to_bytes(4, "little") * 4
    entry = index.admit(key, 30, index.sight(key, 0.0), 0.0)
    assert entry is not None
    entry.making = False
    index.unpin(entry)
    return entry


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_a_pass_relies_on_stays_until_it_has_run(ahead: int) -> None:
    index = an_index(8)
    leases = Leases(index, ahead)
    entry = kept(index, 1)
    leases.hold([entry])
    for _ in range(ahead):
        leases.turn()
    assert (entry.pins, index.give_way(1e30, 0.0)) == (1, 0)
    leases.turn()
    assert entry.pins == 0
    assert index.give_way(1e30, 0.0) > 0
    assert not index.blocks.taken
    index.check()


def test_what_is_dropped_meanwhile_gives_its_memory_back_then() -> None:
    index = an_index(8)
    leases = Leases(index, 1)
    entry = kept(index, 1)
    leases.hold([entry, entry])
    index.clear()
    assert index.blocks.taken
    assert not leases.ran(), "the pass may not have begun"
    leases.turn()
    assert leases.ran()
    assert (index.blocks.taken, leases.ran()) == (set(), False)
    leases.hold([kept(index, 2)])
    leases.end()
    index.clear()
    assert not index.blocks.taken
    index.check()
