"""A stop in a pause, with a manager that stands for SGLang's."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend import drain


class Manager:
    """Told to stop after the first look; `stuck` never lets anybody go on."""

    def __init__(self, paused: bool, stuck: bool = False) -> None:
        self.is_pause, self._stuck = paused, stuck
        self.said: list[str] = []
        self.looks = 0

    @property
    def gracefully_exit(self) -> bool:
        self.looks += 1
        return self.looks > 2

    async def continue_generation(self, message: Any) -> None:
        assert type(message).__name__ == "ContinueGenerationReqInput"
        self.said.append("goes on")
        if self._stuck:
            await asyncio.sleep(3600)
        self.is_pause = False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_S", 0.001)
    monkeypatch.setattr(drain, "PATIENCE_S", 0.05)


def test_the_end_of_a_server_does_not_wait_for_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, answered = threading.Event(), threading.Event()
    monkeypatch.setattr(drain, "_closed", closed)
    waiting = threading.Thread(target=drain.warm_up, args=(answered.wait,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    drain.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert not answered.is_set()
    monkeypatch.setattr(drain, "_closed", threading.Event())
    done: list[str] = []
    drain.warm_up(done.append, "it is waited for as long as the server is open")
    assert len(done) == 1


@pytest.mark.parametrize(
    ("manager", "said"),
    [
        (Manager(paused=False), ["waits for requests"]),
        (Manager(paused=True), ["goes on", "waits for requests"]),
        (Manager(paused=True, stuck=True), ["goes on", "waits for requests"]),
    ],
)
def test_a_pause_ends_before_the_requests_are_waited_for(manager: Manager, said: list[str]) -> None:
    async def waits(given: Manager) -> SimpleNamespace:
        given.said.append("waits for requests")
        return SimpleNamespace(done=True)

    assert asyncio.run(drain.drain(waits, manager)).done
    assert manager.said == said
    assert manager.looks == 3, "nothing happens before the signal"


@pytest.mark.parametrize(
    ("paused", "mode", "asked"),
    [
        (True, "abort", ["retract", "abort"]),
        (False, "abort", ["abort"]),
        (True, "in_place", ["in_place"]),
    ],
)
def test_who_is_paused_in_the_middle_is_retracted_before_it_is_aborted(
    paused: bool, mode: str, asked: list[str]
) -> None:
    modes: list[str] = []

    async def original(_: Manager, message: Any) -> None:
        modes.append(message.mode)

    asyncio.run(drain.pause(original, Manager(paused), SimpleNamespace(mode=mode)))
    assert modes == asked
