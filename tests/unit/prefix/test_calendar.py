"""Aging heaps: bounded storage, bounded moves per call, and heads that stay true."""

import numpy as np
import pytest

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.calendar import AgingHeaps
from sglang_hybrid.prefix.reuse import BINS, EDGES_LIST

FLAT = np.ones((2, BINS))


def test_repricing_again_and_again_does_not_grow_the_heaps() -> None:
    heaps = AgingHeaps(FLAT)
    for step in range(5000):
        heaps.put(step % 5, 0, 0.0, 1.0 + step, 0.0)
    heaps.check()
    assert heaps._stored < 1100
    assert [heaps.pop(0.0) for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_a_jump_in_time_is_caught_up_in_bounded_steps() -> None:
    rates = FLAT.copy()
    rates[0, BINS - 1] = 0.001
    heaps = AgingHeaps(rates)
    for entry in range(500):
        heaps.put(entry, 0, 0.0, 500.0 - entry, 0.0)
    late = EDGES_LIST[BINS - 1] + 1.0
    assert heaps.pop(late) == 63  # 64 entries, the first put ones, have moved to the oldest bin
    heaps.check()
    for _ in range(10):
        heaps.advance(late)
    assert heaps.pop(late) == 499
    heaps.check()


def test_entries_put_with_an_old_last_use_start_in_their_bin() -> None:
    rates = np.tile(np.arange(BINS, 0, -1.0), (1, 1))
    heaps = AgingHeaps(rates)
    heaps.put(1, 0, 100.0, 1.0, 100.0)
    heaps.put(2, 0, 10.0, 1.0, 100.0)
    heaps.put(3, 0, 50.0, 1.0, 100.0)
    heaps.check()
    assert [heaps.pop(100.0) for _ in range(3)] == [2, 3, 1]


def test_check_finds_a_stale_head() -> None:
    heaps = AgingHeaps(FLAT)
    heaps.put(1, 0, 0.0, 2.0, 0.0)
    heaps._heads[0, 0] = 1.0
    with pytest.raises(InvariantError, match="stale"):
        heaps.check()


def test_a_rebuild_during_a_put_schedules_no_entry_twice() -> None:
    rng = np.random.default_rng(11)
    heaps, now = AgingHeaps(np.full((2, BINS), 0.1)), 0.0
    for step in range(4000):
        now += float(rng.exponential(2.0))
        heaps.put(step % 37, int(rng.integers(2)), now, float(rng.uniform(0.1, 1.0)), now)
        if step % 50 == 0:
            heaps.check()
    heaps.advance(now + 100.0)
    heaps.check()
