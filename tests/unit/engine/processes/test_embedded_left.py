"""A request to an engine in somebody's own process, for which nobody waits any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.processes import embedded


async def said() -> AsyncIterator[str]:
    yield "first"
    await asyncio.Event().wait()


async def cancelled(stream: Any, states: dict[str, Any]) -> None:
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])


async def closed(stream: Any, states: dict[str, Any]) -> None:
    await anext(stream)
    await stream.aclose()


async def over(stream: Any, states: dict[str, Any]) -> None:
    await anext(stream)
    states.clear()
    await stream.aclose()


async def named_again(stream: Any, states: dict[str, Any]) -> None:
    await anext(stream)
    states["a"] = object()
    await stream.aclose()


@pytest.mark.parametrize(
    ("leave", "why", "expected"),
    [
        (cancelled, "", ["a"]),
        (closed, "", ["a"]),
        (closed, "its scheduler died", []),
        (over, "", []),
        (named_again, "", []),
    ],
)
def test_it_is_aborted_unless_it_is_over(
    monkeypatch: pytest.MonkeyPatch, leave: Any, why: str, expected: list[str]
) -> None:
    aborted: list[str] = []
    states = {"a": object()}
    manager = SimpleNamespace(rid_to_state=states, abort_request=aborted.append)
    engine = SimpleNamespace(manager=manager, why=why, has=lambda part: part is manager)
    monkeypatch.setattr(embedded, "_engines", [engine])

    async def ask() -> None:
        await leave(embedded.hear(lambda *_: said(), manager, SimpleNamespace(rid="a")), states)

    asyncio.run(ask())
    assert aborted == expected


def test_a_server_hears_of_it_from_sglang() -> None:
    answers = said()
    assert embedded.hear(lambda *_: answers, SimpleNamespace(), SimpleNamespace(rid="a")) is answers


def test_sglangs_requests_are_waited_for_through_it() -> None:
    from sglang_hybrid.engine.surface.hooks import HOOKS

    rows = {hook.target for hook in HOOKS if hook.function == "processes.embedded:hear"}
    assert rows == {"srt.managers.tokenizer_manager:TokenizerManager._wait_one_response"}
