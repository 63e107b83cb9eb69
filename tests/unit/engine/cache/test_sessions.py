"""Turns of streaming sessions that leave the queue without having run, or are retracted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache import clock
from sglang_hybrid.engine.cache.sessions import (
    end_crowded_out,
    end_refused,
    end_turns,
    first,
    is_timed_out,
    keep_nothing,
    let_go,
    prefetch,
    reap,
    stay_under_way,
)


def _turn(session: Any, refused: bool = False) -> Any:
    return SimpleNamespace(session=session, to_finish="in flight" if refused else None)


def _scheduler(*waiting: Any, slots: tuple[str, ...] = (), mode: str = "null") -> Any:
    cache = SimpleNamespace(session=SimpleNamespace(slots=dict.fromkeys(slots)))
    return SimpleNamespace(
        waiting_queue=list(waiting),
        tree_cache=cache,
        disaggregation_mode=SimpleNamespace(value=mode),
        session_controller=SimpleNamespace(sessions={"s": object()}),
    )


def _session() -> Any:
    from sglang.srt.session.session_controller import Session

    session = Session(1000, "s", streaming=True)
    session._inflight = True
    return session


def test_a_turn_that_leaves_the_queue_is_over() -> None:
    """Its session would take no other turn, and could not be closed."""
    gone, stays, beside = _session(), _session(), _session()
    plain = SimpleNamespace(session=None, to_finish=None)
    scheduler = _scheduler(_turn(gone), _turn(stays), _turn(beside, refused=True), plain)

    def original(scheduler: Any, message: Any) -> None:
        assert message.abort_all
        del scheduler.waiting_queue[2:], scheduler.waiting_queue[0]

    end_turns(original, scheduler, SimpleNamespace(abort_all=True))
    assert [each._inflight for each in (gone, stays, beside)] == [False, True, True], "beside: another turn of it runs"


@pytest.mark.parametrize("dropped", [True, False])
def test_a_turn_that_finds_the_queue_full_is_over(dropped: bool) -> None:
    session = _session()
    scheduler = _scheduler()
    scheduler.max_queued_requests = 0
    assert end_crowded_out(lambda *_: dropped, scheduler, _turn(session)) is dropped
    assert session._inflight is not dropped


def test_nobody_looks_through_the_queue_of_many_without_a_reason() -> None:
    """With every request, of ten thousand at once: it would take seconds."""

    class Queue(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("looked through")

    scheduler = _scheduler()
    scheduler.waiting_queue = Queue([_turn(None)] * 3)
    for most in (None, 4):
        scheduler.max_queued_requests = most
        assert end_crowded_out(lambda *_: False, scheduler, _turn(None)) is False
    scheduler.session_controller.sessions.clear()
    assert end_turns(lambda *_: False, scheduler, SimpleNamespace(abort_all=False)) is False


@pytest.mark.parametrize(("answer", "over"), [(True, False), (False, True), (None, True)])
def test_a_turn_that_is_refused_at_the_door_is_over(answer: bool | None, over: bool) -> None:
    """For its priority (False) or for what it asks to be returned (None)."""
    session, beside = _session(), _session()
    assert end_refused(lambda *_: answer, SimpleNamespace(), _turn(session)) is answer
    assert end_refused(lambda *_: answer, SimpleNamespace(), _turn(beside, refused=True)) is answer
    assert (session._inflight, beside._inflight) == (not over, True), "beside: another turn of it runs"


def _matched(session: Any) -> Any:
    """A turn that waits and was matched: what its session keeps is in its hands."""
    from sglang.srt.managers.schedule_batch import Req

    req = Req.__new__(Req)
    req.session, req.to_finish, req.rid = session, None, "r"
    req.kv = SimpleNamespace(mamba_pool_idx=7, req_pool_idx=3)
    req.req_pool_idx = 3  # where 0.5.17 keeps it
    return req


@pytest.mark.parametrize(
    ("slots", "mode", "holds"),
    [(("s",), "null", False), (("s",), "prefill", False), (("s",), "decode", True), ((), "null", True)],
)
def test_a_turn_that_waits_has_nothing_of_its_session_when_it_is_dropped(
    slots: tuple[str, ...], mode: str, holds: bool
) -> None:
    """SGLang takes the end of one that has a row of KV for that of an answer: its prompt stays in the history."""
    req = _matched(_session())
    kv = req.kv
    held: list[bool] = []

    def original(scheduler: Any, _: Any) -> None:
        held.append(scheduler.waiting_queue.pop().kv is kv)

    end_turns(original, _scheduler(req, slots=slots, mode=mode), SimpleNamespace(abort_all=False))
    assert held == [holds]
    assert kv.mamba_pool_idx == 7, "its session has it"
    assert not req.session._inflight


def test_what_a_turn_lets_go_of_in_older_versions() -> None:
    req = SimpleNamespace(kv=1, req_pool_idx=2, mamba_pool_idx=3, mamba_ping_pong_track_buffer=4)
    compat.detach_kv(req)
    assert set(vars(req).values()) == {None}


def test_a_turn_that_waits_through_a_flush_is_matched_anew() -> None:
    """Its row, pages and state are free behind the flush, and others get them."""
    req = _matched(_session())
    kv = req.kv
    let_go(_scheduler(req, slots=("s",)))
    assert req.kv is not kv
    assert req.session._inflight, "it is still to be answered"


@pytest.mark.parametrize("lends", [False, True], ids=["up to 0.5.21", "since 0.5.22"])
def test_a_retracted_turn_is_not_over_and_its_session_keeps_nothing(lends: bool) -> None:
    """SGLang files it as an answer: nobody gets its memory, and another turn may begin beside it."""
    session, told = _session(), list[str]()
    slot = SimpleNamespace(lock="of the tree")
    sessions = SimpleNamespace(slots={"s": slot}, **({"borrowed_slot": None} if lends else {}))
    req = SimpleNamespace(session=session, finished_reason=None, lock=None)
    req.finished = lambda: req.finished_reason is not None

    def original(sessions: Any, req: Any) -> bool:
        told.append(type(req.finished_reason).__name__)
        req.session.abort_req()  # as it does with a turn that was aborted
        return True

    assert keep_nothing(original, sessions, req) is not lends
    assert (req.finished_reason, session._inflight) == (None, False), "one that failed is no longer under way"
    stay_under_way(None, req)
    stay_under_way(None, SimpleNamespace(session=None))
    assert session._inflight, "one that was retracted is"
    if lends:
        assert (sessions.slots, req.lock, slot.lock, told) == ({}, "of the tree", None, [])
    else:
        assert told == ["FINISH_ABORT"], "whose memory is given back"
    req.finished_reason = "length"
    assert keep_nothing(original, sessions, req), "an answer that has ended is SGLang's"
    assert told[-1] == "str"


def test_several_ranks_close_sessions_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own clocks one would have the memory of a session before another, and run another batch."""
    from sglang.srt.session.session_controller import SessionController

    shared = clock.RankClock()
    monkeypatch.setattr(clock, "_clock", shared)
    controller, closed = SessionController(None), list[str]()
    monkeypatch.setattr(controller, "_close", closed.append)
    session = controller.sessions["s"] = _session()
    for now in (5.0, 5.1):  # a tenth of a second apart
        session.close_on_finish = True
        reap(controller)
        controller.maybe_reap(now)
    assert closed == ["s", "s"]
    session.timeout, session.last_active_time = 10.0, -1e9
    told = []
    for seconds, used in ((100.0, 1.0), (109.0, 1.0), (111.0, 1.0), (112.0, 2.0), (123.0, 2.0)):
        session.last_active_time = used
        shared.receive([clock.Stamp(seconds)])
        told.append(is_timed_out(lambda _: pytest.fail("by its own clock"), session))
    assert told == [False, False, True, False, True]


def test_what_a_session_keeps_is_looked_for_in_no_storage() -> None:
    """SGLang asks the tree for a node that stands for the session's memory, and the scheduler ends."""
    asked: list[Any] = []
    scheduler = _scheduler(slots=("s",))
    kept, first = _turn(_session()), _turn(SimpleNamespace(streaming=True, session_id="new"))
    for req in (kept, first, plain := SimpleNamespace(session=None, to_finish=None)):
        prefetch(lambda _, req, end=None: asked.append((req, end)), scheduler, req, 7)
    assert asked == [(first, 7), (plain, 7)]


def test_turns_that_are_at_no_node_of_the_tree_are_sorted_too() -> None:
    """By the weight of nodes: SGLang 0.5.17 loses them, later ones end the scheduler."""
    turn, other, streaming = object(), object(), SimpleNamespace(streaming=True)
    waiting = [SimpleNamespace(last_node=node, session=streaming) for node in (3, turn, 1, 2, other)]

    def original(waiting: list[Any], tree: str) -> None:
        assert tree == "tree"
        waiting.sort(key=lambda req: req.last_node)

    first(original, waiting, "tree")
    assert [req.last_node for req in waiting] == [turn, other, 1, 2, 3]
