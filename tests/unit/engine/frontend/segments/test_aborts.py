"""A request that is aborted while other servers compute its segments ends as one that is aborted later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend.segments.aborts import note, unless_aborted


class Manager:
    """SGLang's tokenizer manager, in front of a scheduler that forgets an abort of what it does not know."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(abort_sent=False, dispatched=False, finished=False)
        self.rid_to_state: dict[str, Any] = {"r": self.state}
        self.ended = False

    def abort_request(self, rid: str) -> None:
        if not self.rid_to_state[rid].abort_sent:
            self.rid_to_state[rid].abort_sent = True
            self.ended = self.state.dispatched


async def goes_by(manager: Manager, meanwhile: Callable[[], Any]) -> bool:
    """The request's way to the scheduler, with something that happens while it is prepared; whether that was ended."""
    begun, cut = asyncio.Event(), False

    async def work() -> None:
        nonlocal cut
        begun.set()
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            cut = True
            raise

    preparing = asyncio.create_task(unless_aborted(manager, "r", work()))
    await begun.wait()
    meanwhile()
    await preparing
    await asyncio.sleep(0.03)
    manager.state.dispatched = True
    await asyncio.sleep(0.05)
    return cut


def test_an_abort_that_comes_early_is_told_again() -> None:
    manager = Manager()
    assert asyncio.run(goes_by(manager, lambda: manager.abort_request("r")))
    assert manager.ended


def test_an_abort_of_all_requests_ends_what_is_prepared() -> None:
    manager = Manager()
    assert asyncio.run(goes_by(manager, lambda: note(manager, abort_all=True)))
    assert manager.ended
    note(manager, abort_all=True)  # nothing is prepared any more


def test_a_request_that_is_gone_is_prepared_no_further_and_not_aborted() -> None:
    manager = Manager()
    assert asyncio.run(goes_by(manager, manager.rid_to_state.clear))
    assert not manager.state.abort_sent


def test_one_that_nobody_aborts_is_prepared_to_the_end() -> None:
    manager = Manager()
    assert not asyncio.run(goes_by(manager, lambda: None))
    assert not manager.state.abort_sent


def test_errors_and_cancellation_pass() -> None:
    async def fail() -> None:
        raise KeyError("a bug")

    async def run() -> None:
        manager, ended = Manager(), asyncio.Event()
        with pytest.raises(KeyError):
            await unless_aborted(manager, "r", fail())
        await unless_aborted(manager, "unknown", asyncio.sleep(0))

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        preparing = asyncio.create_task(unless_aborted(manager, "r", work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
        await ended.wait()

    asyncio.run(run())
