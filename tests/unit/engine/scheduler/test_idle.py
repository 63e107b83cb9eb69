"""What needs an idle scheduler waits for it; later requests wait behind it, and everything else passes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.scheduler import idle
from sglang_hybrid.engine.surface.hooks import HOOKS


class AbortReq(SimpleNamespace):
    pass


class UpdateWeightFromDiskReqInput(SimpleNamespace):
    pass


class ReleaseMemoryOccupationReqInput(SimpleNamespace):
    pass


UPDATE = UpdateWeightFromDiskReqInput(flush_cache=True)
WORK, LATER = SimpleNamespace(input_ids=[1]), SimpleNamespace(batch=[])
OTHER, ABORT = SimpleNamespace(), AbortReq(rid="a")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler without others that have shares of its layers."""
    monkeypatch.setattr(idle, "_least", lambda _scheduler, *counts: list(counts))


def admit(gate: idle.Gate, received: list[Any], idle: bool) -> list[Any]:
    return gate.admit(received, gate.could(received, idle))


def test_stamps_are_taken_before_a_request_is_held() -> None:
    """Else one that is handled later has no time. Of hooks before a function the last runs first."""
    functions = [hook.function for hook in HOOKS]
    assert functions.index("scheduler.idle:hold") < functions.index("cache.clock:take_stamps")


def test_that_it_waits_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = idle.Gate()
    with caplog.at_level(logging.INFO):
        for received in ([UPDATE], [], [LATER], []):
            admit(gate, received, idle=False)
    assert len(caplog.records) == 1


def test_an_idle_scheduler_updates_at_once() -> None:
    gate = idle.Gate()
    assert admit(gate, [OTHER, UPDATE, WORK], idle=True) == [OTHER, UPDATE, WORK]
    assert len(gate) == 0


def test_a_busy_one_ends_its_requests_first() -> None:
    gate = idle.Gate()
    assert admit(gate, [UPDATE, LATER, OTHER], idle=False) == [OTHER]
    assert admit(gate, [], idle=False) == []
    assert admit(gate, [ABORT], idle=False) == [ABORT]  # for those that run; and for those that wait, in their turn
    assert admit(gate, [WORK], idle=True) == [UPDATE, LATER, ABORT, WORK]
    assert len(gate) == 0


def test_a_request_right_before_an_update_runs_before_it() -> None:
    gate = idle.Gate()
    assert admit(gate, [WORK, UPDATE, LATER, UPDATE], idle=True) == [WORK]
    assert admit(gate, [], idle=True) == [UPDATE, LATER]
    assert admit(gate, [], idle=True) == [UPDATE]


def test_groups_of_ranks_update_in_the_step_in_which_all_of_them_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-parallel attention: messages for an idle scheduler reach all groups in one step, requests one of them."""
    gates = [idle.Gate(), idle.Gate()]

    def step(received: list[list[Any]], are_idle: list[bool]) -> list[list[Any]]:
        most = min(gate.could(*given) for gate, *given in zip(gates, received, are_idle, strict=True))
        return [gate.admit(one, most) for gate, one in zip(gates, received, strict=True)]

    assert step([[UPDATE], [UPDATE]], [True, False]) == [[], []]
    assert step([[LATER, UPDATE], [UPDATE]], [True, False]) == [[], []]
    assert step([[], []], [True, True]) == [[UPDATE, LATER], [UPDATE]]
    assert step([[], []], [False, True]) == [[], []]
    assert step([[], []], [True, True]) == [[UPDATE], [UPDATE]]
    assert not any(map(len, gates))
    monkeypatch.setattr(idle, "_gate", idle.Gate())
    monkeypatch.setattr(idle, "_least", lambda *_: [0, 0])
    one = SimpleNamespace(_engine_paused=False, is_fully_idle=lambda: True)
    assert idle.hold(one, [UPDATE]) == ((one, []), {}), "another one is not idle"


def test_an_update_that_keeps_the_cache_needs_no_idle_scheduler() -> None:
    kept = UpdateWeightFromDiskReqInput(flush_cache=False)
    assert admit(idle.Gate(), [kept], idle=False) == [kept]


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
    assert admit(idle.Gate(), asked, idle=False) == ([] if waits else asked)


class Paused:
    """A scheduler in a pause: `middle` says whether requests are in their middle; others wait to begin."""

    _engine_paused = True
    session_controller = SimpleNamespace(sessions={})

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


def test_a_turn_that_waits_with_what_its_session_keeps_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is matched anew. SGLang 0.5.23 minds its row, and nobody could take that from it in a pause."""
    monkeypatch.setattr(idle, "_gate", idle.Gate())
    paused = Paused(middle=False)
    kv = SimpleNamespace(req_pool_idx=3, mamba_pool_idx=7)
    turn = SimpleNamespace(session=SimpleNamespace(streaming=True, session_id="s"), kv=kv)
    turn.detach_kv = lambda: setattr(kv, "req_pool_idx", None)
    paused.session_controller = SimpleNamespace(sessions={"s": turn.session})
    paused.disaggregation_mode = SimpleNamespace(value="null")
    paused.tree_cache = SimpleNamespace(session=SimpleNamespace(slots={"s": None}))
    paused.waiting_queue = [turn]
    paused.is_fully_idle = lambda ignore_waiting=False: kv.req_pool_idx is None
    assert idle.hold(paused, [UPDATE]) == ((paused, [UPDATE]), {})


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another group of ranks"])
@pytest.mark.parametrize("held", [False, True], ids=["in the pause", "right before it"])
def test_an_update_that_would_flush_requests_in_their_middle_is_refused(
    monkeypatch: pytest.MonkeyPatch, held: bool, elsewhere: bool
) -> None:
    """SGLang would end the scheduler on an assertion; and nobody ends before whoever waits here goes on."""
    from sglang.srt.managers import io_struct

    monkeypatch.setattr(idle, "_gate", idle.Gate())
    if elsewhere:
        monkeypatch.setattr(idle, "_least", lambda *_: [0, 0])
    paused, update = Paused(middle=not elsewhere), io_struct.UpdateWeightFromDiskReqInput(model_path="m")
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
