"""Who computes which cold segment: longest first, to whoever is done with it first."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.segment.dispatch import assign, makespan, shared_out

SIZES = st.lists(st.integers(1, 4000), min_size=1, max_size=6)


def drawn(data: st.DataObject, segments: int, least: float, workers: int) -> tuple[list[list[float]], list[float]]:
    """Costs of at least `least`, for `workers` to four workers, and what waits at each."""
    row = st.lists(st.floats(least, 1e4), min_size=segments, max_size=segments)
    costs = data.draw(st.lists(row, min_size=workers, max_size=4))
    return costs, data.draw(st.lists(st.floats(0, 1e4), min_size=len(costs), max_size=len(costs)))


def test_alike_servers_get_the_longest_first() -> None:
    sizes = [1000.0, 4000.0, 3000.0, 2000.0]
    found = assign([sizes, sizes], [0.0, 0.0])
    assert found == [0, 0, 1, 1]
    assert makespan([sizes, sizes], [0.0, 0.0], found) == 5000


def test_one_segment_stays_here_unless_this_server_is_busy() -> None:
    assert assign([[100.0], [100.0]], [0.0, 0.0]) == [0]
    assert assign([[100.0], [100.0]], [10.0, 0.0]) == [1]


def test_what_another_has_is_fetched_if_that_is_quicker_than_computing_it() -> None:
    assert assign([[100.0, 100.0], [20.0, 130.0]], [0.0, 0.0]) == [1, 0]
    assert assign([[100.0, 100.0], [220.0, 330.0]], [0.0, 0.0]) == [0, 0]


@given(SIZES, st.integers(1, 3))
def test_it_is_never_far_from_the_best_of_all_assignments(sizes: list[int], workers: int) -> None:
    """Of alike servers LPT is within 4/3 - 1/3m (Graham 1969)."""
    costs, waits = [[float(size) for size in sizes]] * workers, [0.0] * workers
    best = min(makespan(costs, waits, some) for some in product(range(workers), repeat=len(sizes)))
    assert makespan(costs, waits, assign(costs, waits)) <= (4 / 3 - 1 / (3 * workers)) * best + 1e-6


@given(SIZES, st.data())
def test_nobody_is_given_what_another_is_done_with_sooner(sizes: list[int], data: st.DataObject) -> None:
    costs, waits = drawn(data, len(sizes), least=0, workers=2)
    found = assign(costs, waits)
    last = min(range(len(sizes)), key=lambda segment: costs[0][segment])  # the one that was given last
    rest = [makespan(costs, waits, [*found[:last], worker, *found[last + 1 :]]) for worker in range(len(costs))]
    assert min(rest) <= makespan(costs, waits, found) <= max(waits) + sum(map(max, zip(*costs, strict=True)))


def test_idle_servers_share_and_one_alone_does_not() -> None:
    sizes = [100.0] * 4
    assert shared_out([sizes, sizes], [0.0, 0.0]) == ([0, 1, 0, 1], 200.0)
    assert shared_out([sizes], [0.0]) is None
    assert shared_out([[100.0], [100.0]], [0.0, 0.0]) is None
    assert shared_out([[100.0], [89.0]], [0.0, 0.0]) == ([1], 89.0)
    assert shared_out([[100.0], [91.0]], [0.0, 0.0]) is None, "as good as nothing is gained"


def test_servers_that_are_all_busy_share_nothing() -> None:
    """Each prompt would queue twice: for its share, and then for itself."""
    sizes = [100.0] * 4
    assert shared_out([sizes, sizes], [400.0, 400.0]) is None
    assert shared_out([sizes, sizes], [4000.0, 4000.0]) is None
    assert shared_out([sizes, sizes], [20.0, 20.0]) is not None


def test_a_busy_server_is_relieved_by_an_idle_one() -> None:
    sizes = [100.0] * 4
    assert shared_out([sizes, sizes], [4000.0, 0.0]) == ([1, 1, 1, 1], 400.0)
    assert shared_out([sizes, [110.0] * 4], [4000.0, 0.0]) is None, "but not by one that is slower"
    assert shared_out([sizes, sizes, sizes], [4000.0, 0.0, 0.0]) == ([1, 2, 1, 2], 200.0)


@given(SIZES, st.data())
def test_nothing_is_shared_out_that_would_come_later(sizes: list[int], data: st.DataObject) -> None:
    costs, waits = drawn(data, len(sizes), least=1, workers=1)
    found = shared_out(costs, waits)
    if found is not None:
        way, seconds = found
        assert any(way)
        assert seconds == makespan(costs, waits, way)
        assert seconds + waits[0] <= waits[0] + sum(costs[0])
