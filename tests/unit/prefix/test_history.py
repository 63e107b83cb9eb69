"""Ghost history: what a request is told about the past, and how marks change their kind."""

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.reuse.classes import PLAIN_CLASSES, PRIORS
from sglang_hybrid.prefix.reuse.history import AGED, PATH_MARKS, STRIDE, History
from sglang_hybrid.prefix.reuse.table import BINS, ReuseTable, age_bin
from sglang_hybrid.prefix.tree.mark import Kind
from tests.prompts import text


def fresh(**bounds: int) -> History:
    return History(ReuseTable(PRIORS), **bounds)


def test_a_continued_conversation_supersedes_its_end() -> None:
    history, whole = fresh(), text(1, 300)
    first = history.observe(whole[:100], 80, 0.0)
    assert (first.seen_tokens, first.marks, first.branch, first.tip.kind) == (0, (), None, Kind.FRESH)
    second = history.observe(whole[:200], 150, 7.0)
    assert second.marks == ((100, first.tip),)
    assert (first.tip.kind, first.tip.hits, second.tip.kind) == (Kind.SUPERSEDED, 1, Kind.APPENDED)
    assert sum(history.table.events) == 1
    assert history.table.events[Kind.FRESH * BINS + age_bin(7.0)] == 1
    history.check()


def test_an_end_knows_how_many_it_continues() -> None:
    history, whole = fresh(), text(1, 500)
    depths = [history.observe(whole[: 100 * n + 100], 100 * n + 50, float(n)).tip.depth for n in range(4)]
    assert depths == [0, 1, 2, 3]
    asked = history.observe(whole[:480], 480, 5.0)
    assert history.extend(whole, asked.tip, 6.0).depth == 4
    assert history.observe(np.concatenate([whole[:450], text(2, 60)]), 500, 9.0).tip.depth == 0


def test_an_end_knows_how_full_the_context_is() -> None:
    history, whole = fresh(context_tokens=512), text(1, 510)
    ends = [history.observe(whole[:n], n - 20, float(n)).tip for n in (100, 480, 496)]
    assert [end.room for end in ends] == [0, 1, 2]
    asked = history.observe(whole[:500], 500, 600.0)
    assert history.extend(whole, asked.tip, 601.0) is asked.tip
    assert asked.tip.room == 3
    assert asked.tip.reuse_class == PLAIN_CLASSES - 1
    assert fresh().observe(whole, 500, 0.0).tip.room == 0


def test_the_second_request_with_a_shared_beginning_makes_a_branch() -> None:
    history, shared = fresh(), text(1, 64)
    history.observe(np.concatenate([shared, text(2, 50)]), 100, 0.0)
    second = history.observe(np.concatenate([shared, text(3, 50)]), 100, 1.0)
    assert second.seen_tokens == 64
    assert second.branch is not None
    assert second.tip.kind == Kind.DIVERGED
    third = history.observe(np.concatenate([shared, text(4, 50)]), 100, 2.0)
    assert third.marks == ((64, second.branch),)
    assert (third.branch, third.tip.kind, second.branch.hits) == (None, Kind.FRESH, 1)
    history.check()


def test_short_shared_beginnings_are_no_branch_points() -> None:
    history, shared = fresh(), text(1, 5)
    history.observe(np.concatenate([shared, text(2, 50)]), 40, 0.0)
    assert history.observe(np.concatenate([shared, text(3, 50)]), 40, 1.0).branch is None


def test_a_superseded_end_used_again_becomes_a_branch() -> None:
    history, whole = fresh(), text(1, 100)
    end = history.observe(whole, 50, 0.0).tip
    for seed in (2, 3):
        history.observe(np.concatenate([whole, text(seed, 60)]), 140, float(seed))
    assert end.kind == Kind.BRANCH


def test_declared_boundaries_and_seeds_are_marks_at_once() -> None:
    history, system = fresh(), text(1, 40)
    history.seed(system, 0.0)
    told = history.observe(np.concatenate([system, text(2, 60)]), 80, 1.0, boundaries=(60,))
    assert [(at, mark.hits) for at, mark in told.marks] == [(40, 1)]
    again = history.observe(np.concatenate([system, text(2, 60)])[:70], 65, 2.0)
    assert [at for at, _ in again.marks] == [40, 60]
    history.check()


def test_bounds_hold_and_the_least_recent_leaves_first() -> None:
    history = fresh(max_tokens=1000, max_marks=6)
    for seed in range(30):
        history.observe(text(seed, 90), 80, float(seed))
        history.check()
    assert history.observe(text(29, 200), 150, 40.0).seen_tokens == 90
    assert history.observe(text(3, 200), 150, 41.0).seen_tokens == 0


def test_unused_marks_are_counted_as_they_age() -> None:
    history = fresh()
    history.observe(text(1, 50), 40, 0.0)
    history.observe(text(2, 50), 40, 100.0)
    passed = history.table.passed[Kind.FRESH * BINS :][:BINS]
    assert passed[0] == 1
    assert min(passed[: age_bin(100.0) // 2 * 2]) == 1
    assert max(passed[age_bin(100.0) :]) == 0


def test_what_aged_in_an_idle_night_is_counted_once_and_not_by_one_request() -> None:
    history, others = fresh(), 2 * AGED
    used = history.observe(text(0, 20), 20, 0.0).tip
    for n in range(others):
        history.observe(np.array([n, 1, 2], np.int32) + 30_000, 3, 0.0)
    passed = history.table.passed
    morning = 1e6
    history.observe(text(1, 20), 20, morning)
    assert sum(passed) == AGED * STRIDE
    history.observe(np.concatenate((text(0, 20), text(2, 20))), 40, morning)
    assert used.hits == 1, "its age was counted for some bins, and is for the others by its use"
    asked, before = 2, -1.0
    while sum(passed) != before:
        before, asked = sum(passed), asked + 1
        history.observe(text(asked, 20), 20, morning)
    stages = (BINS - 1) // STRIDE
    assert sum(passed) == others * stages * STRIDE + BINS - 1
    history.check()


@pytest.mark.parametrize("bounds", [{"max_tokens": 0}, {"max_marks": 0}, {"max_tokens": -5}])
def test_a_history_without_room_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        fresh(**bounds)


def test_marks_on_one_path_are_bounded_and_what_is_in_use_stays() -> None:
    history, whole = fresh(), text(7, 8000)
    for request in range(250):
        boundaries = tuple(range(1 + request, 8000, 250))
        sighting = history.observe(whole, 8000, float(request), boundaries)
        assert len(sighting.marks) <= PATH_MARKS
        if request % 10 == 0:
            other = history.observe(np.concatenate((whole[:500], text(100 + request, 40))), 540, request + 0.5)
    history.check()
    assert max(at for at, _ in other.marks) > 500 - 16, "where the others part"
