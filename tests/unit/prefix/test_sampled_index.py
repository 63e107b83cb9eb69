"""The sampled index: the exact argmin while the sample holds everything, equal and good victims beyond it."""

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.prefix.eviction.sampled_index import SAMPLE, SampledIndex
from sglang_hybrid.prefix.reuse.table import BINS, EDGES_LIST

FLAT = np.ones((2, BINS))


def filled(entries: int, sample: int = SAMPLE, seed: int = 0) -> SampledIndex:
    """Entry i has density i + 1, in an order without a pattern."""
    index = SampledIndex(FLAT, sample, seed)
    for entry in np.random.default_rng(7).permutation(entries).tolist():
        index.put(entry, entry % 2, 0.0, 1.0 + entry)
    return index


@pytest.mark.parametrize("seed", range(3))
def test_up_to_a_sample_the_victim_is_the_lowest_score(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.1, 1.0, (3, BINS))
    index, now, popped, ids = SampledIndex(rates, sample=200), 0.0, 0, 200
    kinds, last_s, densities = np.zeros(ids, dtype=int), np.zeros(ids), np.full(ids, np.inf)
    for step in range(4000):
        now += float(rng.exponential(0.3))
        action, entry = rng.random(), int(rng.integers(ids))
        if action < 0.6:
            kinds[entry], last_s[entry] = rng.integers(3), now * rng.choice((1.0, 0.5))
            densities[entry] = rng.uniform(0.1, 1.0)
            index.put(entry, int(kinds[entry]), float(last_s[entry]), float(densities[entry]))
        elif action < 0.8:
            densities[entry] = np.inf
            index.discard(entry)
        elif len(index):
            bins = np.searchsorted(EDGES_LIST, now - last_s, side="right") - 1
            assert index.pop(now) == int((rates[kinds, bins] * densities).argmin())
            densities[(rates[kinds, bins] * densities).argmin()] = np.inf
            popped += 1
        if step % 400 == 0:
            index.check()
    assert popped > 200


def test_beyond_the_sample_victims_are_low_and_all_leave_once() -> None:
    index = filled(5000, sample=100)
    victims = [index.pop(0.0) for _ in range(5000)]
    assert sorted(v for v in victims if v is not None) == list(range(5000))
    assert index.pop(0.0) is None
    ranks = np.array([sum(v < victim for v in victims[at:]) / (5000 - at) for at, victim in enumerate(victims[:4900])])
    assert 0.0 < ranks.mean() < 2 / 100  # the lowest of n drawn: 1 / (n + 1) on average


def test_equal_calls_have_equal_victims_and_another_seed_others() -> None:
    first, second, other = filled(3000, 100), filled(3000, 100), filled(3000, 100, seed=1)
    chosen = [[index.pop(0.0) for _ in range(500)] for index in (first, second, other)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_every_entry_can_be_drawn() -> None:
    starts = set()
    for seed in range(300):
        index = SampledIndex(FLAT, sample=1, seed=seed)
        for entry in range(5):
            index.put(entry, 0, 0.0, 1.0)
        starts.add(index.pop(0.0))
    assert starts == set(range(5))


def test_an_entry_put_again_is_priced_anew_and_stays_one() -> None:
    index = filled(10)
    index.put(0, 0, 0.0, 100.0)
    assert [index.pop(0.0) for _ in range(11)] == [*range(1, 10), 0, None]


def test_rates_are_read_as_they_change_and_age_by_themselves() -> None:
    rates = np.tile(np.arange(BINS, 0, -1.0), (1, 1))
    index = SampledIndex(rates)
    for entry, last_s in ((1, 100.0), (2, 10.0), (3, 50.0)):
        index.put(entry, 0, last_s, 1.0)
    assert index.pop(100.0) == 2
    rates[:] = rates[:, ::-1].copy()
    assert [index.pop(100.0) for _ in range(2)] == [1, 3]


def test_time_that_runs_backwards_is_the_latest_use() -> None:
    index = SampledIndex(np.tile(np.arange(BINS, 0, -1.0), (1, 1)))
    index.put(1, 0, 50.0, 1.0)
    index.put(2, 0, 40.0, 1.0)
    assert [index.pop(0.0) for _ in range(2)] == [2, 1]


def test_check_finds_an_entry_that_lost_its_row() -> None:
    index = filled(3)
    index.check()
    index._rows[1] = 0 if index._rows[1] else 1
    with pytest.raises(InvariantError, match="a row of its own"):
        index.check()


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InvariantError, match="contiguous"):
        SampledIndex(np.ones((BINS, 2)).T)
    with pytest.raises(ConfigError, match="one candidate or more: 0"):
        SampledIndex(FLAT, sample=0)
