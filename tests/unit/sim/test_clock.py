"""Time passes for the cache whatever the caller's clock does."""

import math

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.sim.clock import PATIENCE, UNPACED_S, Elapsed


def test_a_clock_that_moves_is_taken_as_it_is() -> None:
    elapsed = Elapsed()
    assert [elapsed.request(at) for at in (5.0, 7.0, 7.0, 10.5)] == [5.0, 7.0, 7.0, 10.5]


def test_a_clock_that_stands_still_passes_in_requests_after_a_while() -> None:
    elapsed = Elapsed()
    times = [elapsed.request(3.0) for _ in range(PATIENCE + 4)]
    assert times == [3.0] * PATIENCE + [3.0 + UNPACED_S * step for step in (1, 2, 3, 4)]


def test_a_clock_set_back_goes_on_from_the_latest_time() -> None:
    elapsed = Elapsed()
    for step in range(20):
        elapsed.request(1000.0 + 2.0 * step)
    for step in range(40):
        elapsed.request(float(step))
    before = elapsed.now
    assert before > 1038.0
    assert elapsed.request(45.0) == pytest.approx(before + 6.0)


def test_looking_moves_the_clock_but_is_no_request() -> None:
    elapsed = Elapsed()
    elapsed.request(1.0)
    assert elapsed.look(4.0) == 4.0
    assert elapsed.look(2.0) == 4.0
    assert elapsed.request(4.0) == 4.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        Elapsed().request(bad)


def test_a_clock_that_ticks_is_waited_for() -> None:
    elapsed = Elapsed()
    for tick in range(30):
        requests = tick + 1  # ever more at every tick, as sessions come
        assert [elapsed.request(float(tick)) for _ in range(requests)] == [float(tick)] * requests


def test_a_burst_beyond_all_before_does_not_set_the_clock_ahead_for_good() -> None:
    elapsed = Elapsed()
    for tick in range(10):
        for _ in range(4):
            elapsed.request(float(tick))
    burst = [elapsed.request(10.0) for _ in range(40)]
    assert burst[0] == 10.0
    assert burst[-1] > 11.0
    assert elapsed.request(30.0) == 30.0
