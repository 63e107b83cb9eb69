"""Entries: who is kept, who leaves, and that memory and pins add up whatever happens."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.tree.mark import Kind
from sglang_hybrid.segment.index import Costs, Entry, SegmentIndex
from sglang_hybrid.segment.keys import Key
from tests.unit.segment.played import BLOCK_TOKENS, MODEL, an_index


def key(name: object) -> Key:
    return blake2b(str(name).encode(), digest_size=16).digest()


def made(index: SegmentIndex, name: object, now: float, tokens: int = BLOCK_TOKENS) -> Entry | None:
    """The entry of a segment that a request of `now` brought, made and let go; None if it was refused."""
    entry = index.admit(key(name), tokens, index.sight(key(name), now), now)
    if entry is not None:
        entry.making = False
        index.unpin(entry)
    return entry


def names(index: SegmentIndex, *among: object) -> list[object]:
    return [name for name in among if index.find(key(name)) is not None]


def test_an_entry_has_states_and_kv() -> None:
    index = an_index(4)
    entry = index.admit(key("a"), 60, index.sight(key("a"), 0.0), 0.0)
    assert entry is not None
    assert index.find(key("a")) is entry
    assert (entry.tokens, entry.slots.size, entry.pins, entry.making, entry.alive) == (60, 60, 1, True, True)
    assert list(index) == [entry]
    assert index.blocks.free == 1
    index.check()


def test_each_reuse_makes_a_segment_worth_more_than_one_that_never_came_again() -> None:
    index = an_index()
    rates = []
    for time in range(0, 60, 10):
        mark = index.sight(key("often"), float(time))
        rates.append(index._order.worth(key("often"), 50, 0, mark, time + 20.0))
    assert mark.hits == 5
    assert mark.kind is Kind.BRANCH
    once = index._order.worth(key("once"), 50, 0, index.sight(key("once"), 50.0), 70.0)
    assert rates[1] > 0.5 * rates[0], "one use is no sign that no other comes"
    assert min(rates[2:]) > 2.0 * max(rates[0], once)


def test_the_entry_that_is_worth_least_goes_for_another() -> None:
    index = an_index(6)  # three entries of one block of KV each
    for time in range(5):
        index.sight(key("often"), 10.0 * time)
    for name, now in (("often", 50.0), ("old", 52.0), ("late", 53.0)):
        assert made(index, name, now)
    assert made(index, "new", 75.0)
    assert names(index, "often", "old", "late", "new") == ["often", "late", "new"]
    assert (index.counts.evicted, len(index)) == (1, 3)
    assert index.sight(key("old"), 76.0).evicted, "its miss has a reason"
    assert not index.sight(key("new"), 76.0).evicted
    assert made(index, "old", 77.0)
    assert not index.sight(key("old"), 78.0).evicted, "it is there again"
    index.check()


def test_one_that_is_worth_less_than_all_is_refused_and_nobody_leaves() -> None:
    index = an_index(4)
    for time in range(20):
        for name in ("a", "b"):
            index.sight(key(name), float(time))
    assert made(index, "a", 20.0)
    assert made(index, "b", 20.0)
    kept = list(index)
    assert made(index, "long ago", 20.5, tokens=1) is None, "a single token saves little per byte"
    assert list(index) == kept
    assert index.counts.evicted == 0
    assert len(index._order) == 2
    index.check()


def test_all_that_leave_for_one_are_worth_less() -> None:
    index = an_index(4)
    for time in range(20):
        index.sight(key("often"), float(time))
    assert made(index, "once", 0.0)
    assert made(index, "often", 20.0)
    mark = index.sight(key("large"), 1.0)
    worth = [
        index._order.worth(key(name), tokens, 0, index.sight(key(name), 20.0) if name == "often" else its, 21.0)
        for name, tokens, its in (("once", 50, next(iter(index)).mark), ("large", 101, mark), ("often", 50, mark))
    ]
    assert worth == sorted(worth)
    assert index.admit(key("large"), 101, mark, 21.0) is None, "it needs the room of both"
    assert index.admit(key("large"), 50, mark, 21.0) is not None, "and now of one"
    assert names(index, "once", "often") == ["often"]
    index.check()


def test_what_no_eviction_makes_room_for_is_refused_at_once() -> None:
    index = an_index(3)
    assert made(index, "small", 0.0)
    assert made(index, "all of it", 1.0, tokens=2 * BLOCK_TOKENS)
    assert names(index, "small", "all of it") == ["all of it"]
    assert made(index, "more", 2.0, tokens=2 * BLOCK_TOKENS + 1) is None
    assert names(index, "all of it") == ["all of it"]
    index.check()


def test_what_somebody_relies_on_stays() -> None:
    index = an_index(4)
    first, second = made(index, "a", 0.0), made(index, "b", 1.0)
    assert first is not None
    assert second is not None
    index.pin(first)
    index.pin(first)
    assert made(index, "c", 900.0)
    assert names(index, "a", "b", "c") == ["a", "c"]
    index.unpin(first)
    assert made(index, "d", 1000.0)
    assert names(index, "a", "c", "d") == ["a", "d"]
    index.unpin(first)
    assert len(index._order) == 2
    with pytest.raises(InvariantError, match="unpinned as often"):
        index.unpin(first)


@pytest.mark.parametrize("how", ["drop", "clear", "abandon"])
def test_memory_comes_back_once_nobody_relies_on_it(how: str) -> None:
    index = an_index(4)
    entry = made(index, "a", 0.0)
    assert entry is not None
    index.pin(entry)
    index.clear() if how == "clear" else getattr(index, how)(entry)
    assert index.find(key("a")) is None
    assert (entry.alive, entry.void) == (False, how == "abandon")
    assert index.blocks.free == 2
    assert index.counts.dropped == (how != "abandon")
    index.check()
    again = made(index, "a", 1.0)  # another entry of the same segment
    assert again is not None
    assert again is not entry
    index.drop(entry)
    assert index.find(key("a")) is again, "who is dropped twice takes nobody along"
    index.unpin(entry)
    index.clear()
    assert index.blocks.free == 4
    index.check()


def test_a_use_is_seen_by_the_order_at_once() -> None:
    index = an_index(6)
    for name, now in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        assert made(index, name, now)
    index.sight(key("a"), 300.0)
    assert made(index, "d", 301.0)
    assert names(index, "a", "b", "c") == ["a", "c"]


def test_longer_segments_are_worth_more_per_byte() -> None:
    costs = Costs(MODEL, 100, 2)
    assert costs.density(100) == pytest.approx(MODEL.prefill_flops(100) / 300)
    assert costs.density(200) > costs.density(100)
    assert costs.density(0) > 0, "never worth nothing: an order of eviction needs a price"


def test_memory_of_transitions_that_vanished_comes_back() -> None:
    index = an_index(6, transitions=6)  # an entry: one block of states, one of KV, two of transitions
    entry = made(index, "a", 0.0)
    assert entry is not None
    assert (entry.transitions.size, index.blocks.free, index.held(entry)) == (6, 2, 100 + 2 * 50 + 6 * 25)
    kept = entry.transitions[:3].tolist()
    index.settle(entry, 3)
    assert entry.transitions.tolist() == kept, "the device put what stays into the first ones"
    assert (index.blocks.free, index.held(entry)) == (3, 100 + 2 * 50 + 3 * 25)
    assert made(index, "b", 1.0), "one free slot and three blocks are enough, beside the block of the first"
    index.check()


def test_new_entries_are_priced_by_what_others_kept() -> None:
    index = an_index(transitions=6)
    assert index.usual_transitions == 6, "nothing is known"
    kept = []
    for name, count in (("a", 1), ("b", 2), ("c", 0)):
        entry = made(index, name, 0.0)
        assert entry is not None
        before = index._worth(entry, 1.0)
        index.settle(entry, count)
        assert index._worth(entry, 1.0) > before, "fewer bytes save as much"
        kept.append(entry)
    assert index.usual_transitions == 1
    assert index._worth(kept[2], 1.0) > index._worth(kept[0], 1.0) > index._worth(kept[1], 1.0)
    index.clear()
    assert index.usual_transitions == 6, "new weights may remember more"


def test_an_entry_that_is_gone_gives_nothing_back_twice() -> None:
    index = an_index(6, transitions=3)
    entry = made(index, "a", 0.0)
    assert entry is not None
    index.clear()
    assert index.blocks.free == 6
    assert made(index, "b", 1.0), "in the same memory"
    index.settle(entry, 1)
    index.check()
    with pytest.raises(InvariantError, match="keeps 0 to 3 transitions: 4"):
        index.settle(entry, 4)


def test_the_history_outlives_evictions_and_has_a_bound() -> None:
    index = an_index(2, history_marks=50)
    for number in range(500):
        made(index, number, float(number))
    assert index._history.tree.states <= 50
    assert index.sight(key(499), 500.0).hits == 1
    assert index.sight(key(0), 500.0).hits == 0, "forgotten long ago"
    index.check()


def test_check_finds_what_does_not_add_up() -> None:
    def broken(how: str) -> SegmentIndex:
        index = an_index(4)
        entry = made(index, "a", 0.0)
        assert entry is not None
        index.check()
        if how == "order":
            index._order.discard(entry)
        elif how == "dead":
            entry.alive = False
        elif how == "void":
            entry.void = True
        elif how == "key":
            entry.key = key("b")
        elif how == "memory":
            entry.slots = entry.slots[1:]
        else:
            index._order._index.discard(entry.number)  # type: ignore[attr-defined]
        return index

    for how, message in [
        ("order", "can leave: 1, 0 in order"), ("dead", "given up"), ("void", "given up"), ("key", "given up"),
        ("memory", "other slots than are taken: 49 of KV"), ("price", "has a price: 1, 0"),
    ]:  # fmt: skip
        with pytest.raises(InvariantError, match=message):
            broken(how).check()
