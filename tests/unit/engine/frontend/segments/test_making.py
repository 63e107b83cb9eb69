"""What requests wait for while segments are made for them: each its time, and no longer than those who asked first."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.segments import parallel, plans
from sglang_hybrid.engine.frontend.segments.peers import NotKept
from tests.unit.engine.frontend.segments.sharing import WHO, Other, document, served

pytestmark = pytest.mark.skipif(not compat.complete(), reason="segments are refused before the start with this SGLang")


def test_who_follows_waits_no_longer_than_who_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PATIENCE_S", 3600.0)
    monkeypatch.setattr(plans, "LEAST_PATIENCE_S", 0.2)
    other = Other()
    other.does = lambda: asyncio.sleep(3600)
    server = served(monkeypatch, other)
    server.parallel.local.pace.add(1e-4)
    other.pace.add(1e-4)

    async def run() -> None:
        first = asyncio.create_task(server.have(document(0), document(1)))
        while not other.asked:
            await asyncio.sleep(0)
        second = asyncio.create_task(server.have(document(1), document(0)))
        await asyncio.wait_for(asyncio.gather(first, second), 60)
        assert other.is_out
        assert not server.parallel._making, "nobody who comes now waits for it"

    asyncio.run(run())


def test_time_is_up_though_who_was_first_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PATIENCE_S", 0.05)
    other = Other()
    other.does = lambda: asyncio.sleep(3600)
    server = served(monkeypatch, other)

    async def run() -> None:
        first = asyncio.create_task(server.have(document(0), document(1)))
        while not other.asked:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(server.have(document(0), document(1)), 60)
        assert other.is_out

    asyncio.run(run())


def test_what_is_there_is_waited_for_no_longer_though_its_neighbour_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    other, go = Other(), asyncio.Event()

    async def one_only() -> None:
        if len(other.asked) > 1:
            await go.wait()

    other.does = one_only
    server = served(monkeypatch, other)

    async def run() -> None:
        first = asyncio.create_task(server.have(*(document(each, 600) for each in range(4))))
        while len(server.parallel._making) != 1:
            await asyncio.sleep(0)
        await server.have(other.asked[0])
        assert not first.done()
        go.set()
        await first

    asyncio.run(run())


def test_the_scheduler_is_not_asked_where_nobody_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Other(waiting=10**6)
    server = served(monkeypatch, busy)
    for number in range(5):
        server.run(document(2 * number), document(2 * number + 1))
    assert (busy.probes, server.questions, busy.asked, server.computed) == (5, 0, [], [])


def test_a_scheduler_that_does_not_answer_in_time_keeps_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PATIENCE_S", 0.05)
    other = Other()
    server = served(monkeypatch, other)

    async def ask(_: Any, question: dict[str, Any]) -> dict[str, Any]:
        if "who" not in question:
            await asyncio.sleep(3600)
        return WHO

    monkeypatch.setattr(parallel, "ask", ask)
    server.run(document(0), document(1))
    assert (other.probes, other.asked, server.computed) == (1, [], [])


def test_only_what_is_cold_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other()
    server = served(monkeypatch, other, kept=[document(0), document(1)])
    server.run(*map(document, range(4)))
    assert sorted(other.asked + server.computed) == [document(2), document(3)]
    server = served(monkeypatch, other, kept=[document(4), document(5)])
    server.run(*map(document, range(4, 7)))
    assert (len(other.asked), server.computed) == (1, []), "one document is too little"


def test_a_server_whose_weights_changed_learns_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other()
    server = served(monkeypatch, other)
    forms = list[str]()

    async def ask(_: Any, question: dict[str, Any]) -> dict[str, Any]:
        forms.append(str(len(forms)))
        return {**WHO, "form": forms[-1], "cold": []}

    async def differs(_: Any, __: str, form: str, ___: Any) -> None:
        assert form == forms[-1]
        other.fail(ValueError("they differ"), time.monotonic())

    monkeypatch.setattr(parallel, "ask", ask)
    monkeypatch.setattr(other, "probe", differs)
    server.run(document(0), document(1))
    other._until = 0.0
    server.run(document(2), document(3))
    assert forms == ["0", "1"]


def failing(other: Other, monkeypatch: pytest.MonkeyPatch, sent: list[Exception | None], kept: Exception | None) -> Any:
    """Segments of which each is sent or fails as `sent` says."""
    left = sent[:]

    async def do() -> None:
        if (error := left.pop(0)) is not None:
            raise error

    async def keep(_: Any) -> None:
        if kept is not None:
            raise kept

    other.does, other.keep = do, keep  # type: ignore[method-assign]
    server = served(monkeypatch, other)
    server.run(*map(document, range(4)))
    return server


def test_each_failure_is_seen_and_none_hides_another(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other()
    failing(other, monkeypatch, [None, TimeoutError()], NotKept("full"))
    assert (other.is_out, other.why) == (True, "TimeoutError: ")


@pytest.mark.parametrize("error", [NotKept("full"), ConfigError("no such question"), OSError("no files are left")])
def test_a_fault_of_this_server_is_none_of_another(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    other = Other()
    failing(other, monkeypatch, [None, None], error)
    assert (other.is_out, other.why, other.pace.value) == (False, "", None)
