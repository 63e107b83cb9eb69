"""What needs an idle scheduler waits for it; later requests wait behind it, and everything else passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend import idle


class AbortReq(SimpleNamespace):
    pass


class UpdateWeightFromDiskReqInput(SimpleNamespace):
    pass


class ReleaseMemoryOccupationReqInput(SimpleNamespace):
    pass


UPDATE = UpdateWeightFromDiskReqInput(flush_cache=True)
WORK, LATER = SimpleNamespace(input_ids=[1]), SimpleNamespace(batch=[])
OTHER, ABORT = SimpleNamespace(), AbortReq(rid="a")


def test_an_idle_scheduler_updates_at_once() -> None:
    gate = idle.Gate()
    assert gate.admit([OTHER, UPDATE, WORK], idle=True) == [OTHER, UPDATE, WORK]
    assert len(gate) == 0


def test_a_busy_one_ends_its_requests_first() -> None:
    gate = idle.Gate()
    assert gate.admit([UPDATE, LATER, OTHER], idle=False) == [OTHER]
    assert gate.admit([], idle=False) == []
    assert gate.admit([ABORT], idle=False) == [ABORT]  # for those that run; and for those that wait, in their turn
    assert gate.admit([WORK], idle=True) == [UPDATE, LATER, ABORT, WORK]
    assert len(gate) == 0


def test_a_request_right_before_an_update_runs_before_it() -> None:
    gate = idle.Gate()
    assert gate.admit([WORK, UPDATE, LATER, UPDATE], idle=True) == [WORK]
    assert gate.admit([], idle=True) == [UPDATE, LATER]
    assert gate.admit([], idle=True) == [UPDATE]


def test_an_update_that_keeps_the_cache_needs_no_idle_scheduler() -> None:
    kept = UpdateWeightFromDiskReqInput(flush_cache=False)
    assert idle.Gate().admit([kept], idle=False) == [kept]


@pytest.mark.parametrize(("memory", "waits"), [("static", True), ("elastic", False)])
def test_only_elastic_memory_is_given_back_under_load(
    monkeypatch: pytest.MonkeyPatch, memory: str, waits: bool
) -> None:
    monkeypatch.setattr(idle, "settings", lambda: SimpleNamespace(memory=memory))
    asked: list[Any] = [ReleaseMemoryOccupationReqInput(tags=None)]
    assert idle.Gate().admit(asked, idle=False) == ([] if waits else asked)


def test_a_paused_scheduler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_gate", idle.Gate())
    paused = SimpleNamespace(_engine_paused=True, is_fully_idle=lambda: False)
    assert idle.hold(paused, [UPDATE]) == ((paused, [UPDATE]), {})
    busy = SimpleNamespace(_engine_paused=False, is_fully_idle=lambda: False)
    assert idle.hold(busy, [OTHER]) is None
    assert idle.hold(busy, [UPDATE]) == ((busy, []), {})
    assert idle.hold(paused, []) == ((paused, [UPDATE]), {})
