"""One clock for all ranks: stamps travel with requests, and a clock that stands still is said."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_hybrid.engine.cache import clock
from sglang_hybrid.engine.cache.clock import RankClock, Stamp


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> RankClock:
    monkeypatch.setattr(clock, "_clock", None)
    return clock.share(RankClock(read=iter([5.0, 7.0]).__next__))


def request(rid: str = "r") -> SimpleNamespace:
    return SimpleNamespace(rid=rid, input_ids=[1, 2])


def test_every_rank_takes_the_time_of_the_first(shared: RankClock) -> None:
    received = [request("a"), request("b")]
    clock.stamp(received)
    taken = clock.take_stamps("scheduler", received)
    assert taken == (("scheduler", received[:2]), {})
    assert shared.now() == 5.0
    assert received[-1] == Stamp(5.0), "a pipeline stage hands the list on, stamp included"


def test_a_batch_is_stamped_once_and_an_empty_one_never(shared: RankClock) -> None:
    received = [request(), Stamp(3.0)]
    clock.stamp(received)
    assert len(received) == 2
    empty: list[object] = []
    clock.stamp(empty)
    clock.stamp(None)
    assert empty == []


def test_time_never_runs_backwards(shared: RankClock) -> None:
    shared.receive([Stamp(9.0)])
    shared.receive([request(), Stamp(4.0)])
    assert shared.now() == 9.0


def test_requests_without_a_stamp_are_an_error_said_once(shared: RankClock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        shared.receive([SimpleNamespace(rid="an abort that this rank made up itself")])
        assert caplog.records == []
        shared.receive([request()])
        shared.receive([request()])
    assert len(caplog.records) == 1


def test_stamps_stay_with_the_requests_of_a_group(shared: RankClock) -> None:
    work, control = clock.keep_with_work(([request()], ["flush", Stamp(2.0)]))
    assert control == ["flush"]
    assert work[1:] == [Stamp(2.0)]


def test_a_server_of_one_rank_sends_no_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_clock", None)
    received = [request()]
    clock.stamp(received)
    assert clock.take_stamps("scheduler", received) is None
    assert len(received) == 1
