"""The reuse table: hazards from counts, and the Gittins index against brute force."""

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.prefix.reuse.table import BINS, EDGES_LIST, LEAST_RATE, WIDTHS_S, Prior, ReuseTable, age_bin, gittins


def test_age_bins_partition_all_ages() -> None:
    assert age_bin(-3.0) == 0
    assert age_bin(0.0) == 0
    for at_bin, edge in enumerate(EDGES_LIST[:-1]):
        assert age_bin(edge) == at_bin
    assert age_bin(1e12) == BINS - 1


def test_gittins_is_the_best_chance_per_held_second() -> None:
    hazard = np.random.default_rng(1).random(BINS) * 0.5
    for start in (0, 7, BINS - 1):
        best, alive, chance, held = 0.0, 1.0, 0.0, 0.0
        for at_bin in range(start, BINS):
            held += alive * WIDTHS_S[at_bin] * (1.0 - hazard[at_bin] / 2.0)
            chance += alive * hazard[at_bin]
            alive *= 1.0 - hazard[at_bin]
            best = max(best, chance / held)
        assert gittins(hazard.tolist())[start] == pytest.approx(best)


def test_a_certain_reuse_ends_the_wait() -> None:
    index = gittins([0.0, 1.0, 0.5] + [0.0] * (BINS - 3))
    assert index[1] == pytest.approx(2.0 / WIDTHS_S[1])
    assert index[-1] == LEAST_RATE


def test_waiting_for_a_certain_return_gains_value_with_age() -> None:
    hazard = np.zeros(BINS)
    hazard[20] = 1.0
    index = np.array(gittins(hazard.tolist()))
    assert (np.diff(index[:21]) > 0).all()
    assert index[21] < index[0]


def learned(table: ReuseTable) -> None:
    for _ in range(400):
        table.record_use(0, 10)
        table.record_passed(1, 0, BINS - 1)
    for _ in range(8):
        table.refresh()


def test_classes_learn_apart() -> None:
    table = ReuseTable([Prior(), Prior()], shrinkage=20.0)
    learned(table)
    assert table.index[0, 0] > 5 * table.index[1, 0]
    assert table.hazard(0)[10] > 0.4
    table.check()


def test_prior_orders_classes_before_anything_was_seen() -> None:
    table = ReuseTable([Prior(), Prior(0.05)])
    assert table.index[0, 0] > 2 * table.index[1, 0]


def test_a_class_may_name_what_is_expected_of_it() -> None:
    named = (0.0,) * 5 + (0.5,) * 5 + (0.0,) * (BINS - 10)
    table = ReuseTable([Prior(), Prior(hazard=named)])
    assert table.hazard(1)[7] == pytest.approx(0.5)
    assert max(table.hazard(1)[:4]) == 0.0 < min(table.hazard(0))


def test_classes_of_a_group_learn_from_each_other() -> None:
    alone = ReuseTable([Prior()] * 3)
    group = ReuseTable([Prior(group="ends")] * 2 + [Prior()])
    for table in (alone, group):
        for _ in range(200):
            table.record_use(0, 10)
            for _ in range(4):
                table.record_passed(2, 0, BINS - 1)
    assert group.hazard(0)[10] == pytest.approx(alone.hazard(0)[10], rel=0.15)
    assert group.hazard(1)[10] > 2 * alone.hazard(1)[10]


def test_the_index_follows_the_counts_at_once_while_they_are_few_and_seldom_later() -> None:
    table = ReuseTable([Prior(), Prior()])
    refreshed = []
    for number in range(3000):
        before = table.index[0].copy()
        table.record_use(0, number % 6)
        table.refresh()
        refreshed.append(not np.array_equal(before, table.index[0]))
        now = gittins(table.hazard(0))
        assert table.index[0] == pytest.approx(now, rel=0.1)
    assert all(refreshed[:30])
    assert sum(refreshed[1000:]) < 100


def test_old_counts_fade() -> None:
    table = ReuseTable([Prior(), Prior()], half_life=80.0)
    learned(table)
    assert sum(table.events[:BINS]) < 120.0
    table.check()


def test_bad_tables_are_refused_and_damage_is_found() -> None:
    for arguments in (([],), ([Prior()], 0.0), ([Prior()], 1.0, 0.0)):
        with pytest.raises(ConfigError):
            ReuseTable(*arguments)  # type: ignore[arg-type]
    table = ReuseTable([Prior()])
    for wrong in (-1.0, 1.0):  # a count that is none, one that is in no sum
        table.events[0] = wrong
        with pytest.raises(InvariantError):
            table.check()
    table.events[0] = 0.0
    table.index[0, 0] = np.nan
    with pytest.raises(InvariantError):
        table.check()
