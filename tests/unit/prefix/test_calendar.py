"""Aging heaps: the exact table, slices that age together, bounded storage and bounded moves per call."""

import numpy as np
import pytest

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.calendar import ROWS, AgingHeaps
from sglang_hybrid.prefix.reuse import BINS, EDGES_LIST

FLAT = np.ones((2, BINS))


def filled(heaps: AgingHeaps, entries: int, now: float = 0.0) -> None:
    """Entries 0, 1, 2 ... of falling density: the last one is the victim."""
    for entry in range(entries):
        heaps.put(entry, 0, now, float(entries - entry), now)


def test_repricing_again_and_again_does_not_grow_a_slice() -> None:
    heaps = AgingHeaps(FLAT)
    filled(heaps, ROWS + 5)
    for step in range(5000):
        heaps.put(step % 5, 0, 0.0, 2000.0 + step, 0.0)
    heaps.check()
    assert sum(map(len, heaps._tops)) == len(heaps._ageing) == 1
    assert [heaps.pop(0.0) for _ in range(ROWS)] == list(range(ROWS + 4, 4, -1))
    assert [heaps.pop(0.0) for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_entries_that_leave_before_they_age_leave_no_slices_behind() -> None:
    heaps = AgingHeaps(FLAT)
    filled(heaps, ROWS)
    for step in range(20_000):
        now = 100.0 + step
        heaps.put(10_000 + step, step % 2, now, 1.0 + step % 7, now)
        heaps.discard(10_000 + step - ROWS - 40)
    heaps.check()
    assert sum(map(len, heaps._tops)) <= len(heaps) - ROWS


def test_a_jump_in_time_moves_the_table_at_once_and_slices_in_bounded_steps() -> None:
    rates = FLAT.copy()
    rates[0, BINS - 1] = 0.001
    heaps = AgingHeaps(rates)
    for entry in range(4 * ROWS):
        heaps.put(entry, 0, 0.001 * entry, 1e9 - entry, 0.001 * entry)
    late = EDGES_LIST[BINS - 1] + 100.0
    assert heaps.pop(late) == 4 * ROWS - 1
    assert heaps.pop(late) == 4 * ROWS - 2
    assert heaps._ageing.first().key < late
    for _ in range(100):
        heaps.advance(late)
    assert len(heaps._ageing) == 0
    heaps.check()


def test_entries_put_with_an_old_last_use_start_in_their_bin() -> None:
    rates = np.tile(np.arange(BINS, 0, -1.0), (1, 1))
    heaps = AgingHeaps(rates)
    heaps.put(1, 0, 100.0, 1.0, 100.0)
    heaps.put(2, 0, 10.0, 1.0, 100.0)
    heaps.put(3, 0, 50.0, 1.0, 100.0)
    heaps.check()
    assert [heaps.pop(100.0) for _ in range(3)] == [2, 3, 1]


@pytest.mark.parametrize("seed", range(3))
def test_far_beyond_the_table_a_victim_is_the_lowest_but_for_ages_close_to_an_edge(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.1, 1.0, (3, BINS))
    heaps, now, popped, ids = AgingHeaps(rates), 0.0, 0, 4 * ROWS
    kinds, last_s, densities = np.zeros(ids, dtype=int), np.zeros(ids), np.full(ids, np.inf)
    for step in range(8000):
        now += float(rng.exponential(0.3))
        action, entry = rng.random(), int(rng.integers(ids))
        if action < 0.8:
            if densities[entry] == np.inf or rng.random() < 0.7:
                kinds[entry], last_s[entry] = rng.integers(3), now
            densities[entry] = rng.uniform(0.1, 1.0)
            heaps.put(entry, int(kinds[entry]), float(last_s[entry]), float(densities[entry]), now)
        elif action < 0.9:
            densities[entry] = np.inf
            heaps.discard(entry)
        elif len(heaps) > 2 * ROWS:
            ages = np.outer((0.85, 1.0, 1.15), now - last_s)  # a slice may be early or late
            bins = (np.searchsorted(EDGES_LIST, ages, side="right") - 1).clip(0)
            scores = rates[kinds, bins] * densities
            victim = heaps.pop(now)
            assert victim is not None
            assert heaps.last_score in scores[:, victim]
            assert heaps.last_score <= scores.max(axis=0).min()
            densities[victim] = np.inf
            popped += 1
        if step % 800 == 0:
            heaps.check()
    assert popped > 200


def test_check_finds_a_head_that_hides_an_entry() -> None:
    heaps = AgingHeaps(FLAT)
    filled(heaps, ROWS + 3)
    heaps.check()
    heaps._head[0] = 1e9
    with pytest.raises(InvariantError, match="stale"):
        heaps.check()


def test_check_finds_an_entry_that_lost_its_row() -> None:
    heaps = AgingHeaps(FLAT)
    heaps.put(1, 0, 0.0, 2.0, 0.0)
    heaps._rows[heaps._entries[1].row] = None
    with pytest.raises(InvariantError, match="not in its place"):
        heaps.check()


def test_rates_that_would_be_copied_are_refused() -> None:
    with pytest.raises(InvariantError, match="contiguous"):
        AgingHeaps(np.ones((BINS, 2)).T)
