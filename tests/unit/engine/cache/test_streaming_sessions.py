"""Whose streaming session gives up what it keeps, where a request waits for memory and nobody runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.cache import hooks, sessions


class Scheduler:
    """SGLang's, as far as `relieve` knows it: sessions by name, (in flight, last turn), and who waits."""

    def __init__(self, known: dict[str, tuple[bool, float]], waiting: tuple[str | None, ...] = ()) -> None:
        made = {
            name: SimpleNamespace(session_id=name, streaming=True, _inflight=runs, last_active_time=at, timeout=None)
            for name, (runs, at) in known.items()
        }
        self.session_controller = SimpleNamespace(sessions=made)
        self.released: list[str] = []
        self.detached: list[str] = []
        self.tree_cache = SimpleNamespace(
            session=SimpleNamespace(slots=dict.fromkeys(known)), release_session=self.released.append
        )
        self.waiting_queue = [self._turn(None if name is None else made[name]) for name in waiting]

    def _turn(self, session: Any) -> Any:
        return SimpleNamespace(session=session, detach_kv=lambda: self.detached.append(session.session_id))


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(starved=True, account=SimpleNamespace(event=lambda _: None), at_s=0.0)
    made.now = lambda: made.at_s
    monkeypatch.setattr(sessions, "coordinator_of", lambda _: made)
    return made


NOBODY, SOMEBODY = (SimpleNamespace(is_empty=lambda empty=empty: empty, batch_is_full=False) for empty in (True, False))


@pytest.mark.parametrize(
    ("known", "waiting", "released"),
    [
        ({"a": (False, 2.0), "b": (False, 1.0), "c": (True, 0.0)}, ("c",), ["b"]),
        ({"a": (True, 2.0), "b": (True, 1.0), "c": (True, 3.0)}, ("a", "b", "c"), ["c"]),
        ({"a": (True, 1.0), "b": (True, 2.0)}, (None, "a", None), ["a"]),
        ({"a": (True, 1.0)}, ("a",), []),
        ({}, (None,), []),
    ],
    ids=["the longest idle", "the last that waits", "others wait too", "not who is next", "no sessions"],
)
def test_one_gives_up(
    coordinator: Any, known: dict[str, tuple[bool, float]], waiting: tuple[str | None, ...], released: list[str]
) -> None:
    scheduler = Scheduler(known, waiting)
    assert sessions.relieve((None, NOBODY), scheduler) == (None, NOBODY)
    assert scheduler.released == released
    assert scheduler.detached == [name for name in released if known[name][0]], "it may hold its session's memory"
    assert not coordinator.starved


@pytest.mark.parametrize(
    ("starved", "result"), [(False, (None, NOBODY)), (True, (None, SOMEBODY)), (True, (1, NOBODY))]
)
def test_nobody_gives_up_while_anything_goes_on(coordinator: Any, starved: bool, result: Any) -> None:
    coordinator.starved, scheduler = starved, Scheduler({"a": (False, 1.0)})
    assert sessions.relieve(result, scheduler) == result
    assert scheduler.released == []


def test_sessions_that_nobody_comes_back_to_make_way_for_those_that_wait_beside_others(coordinator: Any) -> None:
    """Each keeps a row, KV and a state: with all but one row kept, requests would run one after the other for ever."""
    coordinator.starved = False
    known = {"a": (False, 3.0), "b": (False, 2.0), "runs": (True, 0.0), "bounded": (False, 1.0)}
    scheduler, full = Scheduler(known, (None,)), SimpleNamespace(is_empty=lambda: False, batch_is_full=True)
    scheduler.session_controller.sessions["bounded"].timeout = 600.0

    def relieved(at_s: float) -> list[str]:
        coordinator.at_s, full.batch_is_full = at_s, True
        sessions.relieve((None, full), scheduler)
        released, scheduler.released[:] = list(scheduler.released), []
        assert full.batch_is_full is not bool(released), "whoever waits is asked again"
        for name in released:
            del scheduler.tree_cache.session.slots[name]
        return released

    assert relieved(0.0) == []
    assert relieved(59.0) == []
    scheduler.session_controller.sessions["a"].last_active_time = 4.0  # a turn, and idle again
    assert [relieved(at_s) for at_s in (61.0, 62.0, 120.0, 122.0, 999.0)] == [["b"], [], [], ["a"], []]
    scheduler.waiting_queue.clear()
    scheduler.tree_cache.session.slots["b"] = None
    assert relieved(2000.0) == [], "nobody waits"


@pytest.mark.parametrize(("admits", "others", "starved"), [(False, [], True), (False, ["x"], False), (True, [], False)])
def test_who_is_not_admitted_with_nobody_else_starves(
    monkeypatch: pytest.MonkeyPatch, admits: bool, others: list[str], starved: bool
) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    memory = SimpleNamespace(room_for=lambda *_: False, let_go=lambda _: False)
    coordinator = SimpleNamespace(memory=memory, composer=None, starved=False)
    monkeypatch.setattr(hooks, "coordinator_of", lambda _: coordinator)
    running = SimpleNamespace(is_empty=lambda: not admits)
    adder = SimpleNamespace(tree_cache=None, page_size=1, running_batch=running, can_run_list=others)
    hooks.admit(lambda *_: AddReqResult.CONTINUE, adder, SimpleNamespace())
    assert coordinator.starved is starved


@pytest.mark.parametrize(
    ("last", "turn", "aborted", "released"),
    [
        ("A", "A", False, []),
        ("A", "B", False, ["a"]),
        (None, "B", False, ["a"]),
        ("A", "B", True, []),
    ],
    ids=["the same adapter", "another", "none before", "refused beside one that runs"],
)
def test_a_turn_with_another_adapter_has_nothing_of_its_session(
    last: str | None, turn: str, aborted: bool, released: list[str]
) -> None:
    scheduler = Scheduler({"a": (True, 1.0)})
    session = scheduler.session_controller.sessions["a"]
    session.req_nodes = {"one": SimpleNamespace(req=SimpleNamespace(extra_key=last))}
    sessions.change_key(scheduler, SimpleNamespace(session=session, extra_key=turn, to_finish=aborted or None))
    sessions.change_key(scheduler, SimpleNamespace(session=None, extra_key=turn, to_finish=None))
    assert scheduler.released == released


def test_a_first_turn_has_nothing_to_give_up() -> None:
    scheduler = Scheduler({"a": (True, 1.0)})
    session = scheduler.session_controller.sessions["a"]
    session.req_nodes = {}
    sessions.change_key(scheduler, SimpleNamespace(session=session, extra_key="A", to_finish=None))
    assert scheduler.released == []
