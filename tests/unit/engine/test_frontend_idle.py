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


@pytest.mark.parametrize(
    ("memory", "tags", "waits"),
    [
        ("static", None, True),
        ("elastic", None, False),
        ("elastic", ["kv_cache"], False),
        ("elastic", ["kv_cache", "weights"], True),
        ("elastic", ["weights"], True),
    ],
)
def test_only_elastic_memory_is_given_back_under_load(
    monkeypatch: pytest.MonkeyPatch, memory: str, tags: list[str] | None, waits: bool
) -> None:
    """Weights are SGLang's: its scheduler ends on an assertion unless it is idle."""
    monkeypatch.setattr(idle, "settings", lambda: SimpleNamespace(memory=memory))
    asked: list[Any] = [ReleaseMemoryOccupationReqInput(tags=tags)]
    assert idle.Gate().admit(asked, idle=False) == ([] if waits else asked)


class Paused:
    """A scheduler in a pause: `middle` says whether requests are in their middle; others wait to begin."""

    _engine_paused = True

    def __init__(self, middle: bool) -> None:
        self._middle = middle
        self.sent: list[tuple[Any, Any]] = []
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=self)

    def is_fully_idle(self, ignore_waiting: bool = False) -> bool:
        return ignore_waiting and not self._middle

    def send_output(self, output: Any, message: Any) -> None:
        self.sent.append((output, message))


def test_in_a_pause_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_gate", idle.Gate())
    paused = Paused(middle=False)
    assert idle.hold(paused, [UPDATE]) == ((paused, [UPDATE]), {})
    assert idle.hold(paused, [WORK, UPDATE]) == ((paused, [WORK]), {})
    assert idle.hold(paused, []) == ((paused, [UPDATE]), {})
    busy = SimpleNamespace(_engine_paused=False, is_fully_idle=lambda: False)
    assert idle.hold(busy, [OTHER]) is None
    assert idle.hold(busy, [UPDATE]) == ((busy, []), {})
    assert idle.hold(paused, []) == ((paused, [UPDATE]), {})
    assert paused.sent == []


@pytest.mark.parametrize("held", [False, True], ids=["in the pause", "right before it"])
def test_an_update_that_would_flush_requests_in_their_middle_is_refused(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """SGLang would end the scheduler on an assertion; and nobody ends before whoever waits here goes on."""
    from sglang.srt.managers import io_struct

    monkeypatch.setattr(idle, "_gate", idle.Gate())
    paused, update = Paused(middle=True), io_struct.UpdateWeightFromDiskReqInput(model_path="m")
    busy = SimpleNamespace(_engine_paused=False, is_fully_idle=lambda: False)
    if held:
        assert idle.hold(busy, [update, LATER]) == ((busy, []), {})
    assert idle.hold(paused, [OTHER] if held else [OTHER, update, LATER]) == (
        (paused, [LATER, OTHER] if held else [OTHER, LATER]), {},
    )  # fmt: skip
    [(answer, asked)] = paused.sent
    assert asked is update
    assert not answer.success
    assert "flush_cache false" in answer.message
    assert idle.hold(paused, [UpdateWeightFromDiskReqInput(flush_cache=False)]) is None


def test_every_update_of_weights_can_be_refused() -> None:
    from sglang.srt.managers import io_struct

    updates = [name for name in dir(io_struct) if name.startswith("UpdateWeight") and name.endswith("ReqInput")]
    flushes = [name for name in updates if hasattr(getattr(io_struct, name), "flush_cache")]
    assert len(flushes) >= 4
    paused = Paused(middle=True)
    for name in flushes:
        assert idle._refuse(paused, type(name, (), {"flush_cache": True})())
    assert {type(answer).__name__ for answer, _ in paused.sent} == {name[:-5] + "Output" for name in flushes}
