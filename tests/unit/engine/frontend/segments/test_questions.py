"""Questions to the scheduler: each gets its own answer, and what it refers to is there until then."""

from __future__ import annotations

import asyncio
import os
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.segments.files import Files
from sglang_hybrid.engine.frontend.segments.peers import Parcel
from sglang_hybrid.engine.frontend.segments.questions import ask
from sglang_hybrid.engine.segments import hooks, listing
from tests.unit.engine.segments.exchanging import IDS, Composer, exchange, static

pytestmark = pytest.mark.skipif(not compat.complete(), reason="segments are refused before the start with this SGLang")


class Manager:
    """SGLang's own way of asking a scheduler, in front of one that answers when a test says so."""

    def __init__(self, composer: Composer | None = None) -> None:
        from sglang.srt.managers.communicator import FanOutCommunicator

        self.sent: list[Any] = []
        self.dumper_control = FanOutCommunicator(self.sent.append, 1, "queueing")
        self.composer = composer or static()
        self.composer.exchange = exchange(self.composer)  # type: ignore[attr-defined]

    async def round(self) -> None:
        """The scheduler answers what is there; who asked goes on."""
        await settled()
        for message in self.sent[:]:
            self.sent.remove(message)
            scheduler = SimpleNamespace(tree_cache=self.composer)
            self.dumper_control.handle_recv(listing.control(lambda *_: None, scheduler, message))
        await settled()


async def settled() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _composers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "composer_of", lambda cache: cache)


def test_who_leaves_shifts_nobodys_answer() -> None:
    manager = Manager()

    async def run() -> list[Any]:
        leaves = asyncio.create_task(ask(manager, {"find": [[1] * 40], "namespace": None}))
        await settled()
        leaves.cancel()
        others = [asyncio.create_task(ask(manager, body)) for body in ({"list": 1}, {"who": None}, {"drop": []})]
        for _ in range(4):
            await manager.round()
        return await asyncio.gather(*others)

    listed, who, dropped = asyncio.run(run())
    assert listed["count"] == 0
    assert set(who) >= {"server", "form", "ranks"}
    assert dropped == {"dropped": []}


def test_nobody_is_asked_for_who_left_before_his_turn() -> None:
    manager = Manager()

    async def run() -> None:
        first, second = (asyncio.create_task(ask(manager, {"who": None})) for _ in range(2))
        await settled()
        second.cancel()
        await manager.round()
        await first
        assert manager.sent == []

    asyncio.run(run())


def test_a_question_that_cannot_be_answered_leaves_the_next_one_alone() -> None:
    manager = Manager()

    async def run() -> None:
        wrong, right = (asyncio.create_task(ask(manager, body)) for body in ({"nonsense": 1}, {"who": None}))
        await manager.round()
        await manager.round()
        with pytest.raises(ConfigError, match="no such question"):
            await wrong
        assert "form" in await right

    asyncio.run(run())


def test_questions_for_what_is_cold_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()

    def answer(_: Any, question: dict[str, Any]) -> dict[str, Any]:
        if question.get("cold") == "wrong":
            raise ValueError("wrong")
        return {"cold": question["cold"]} if "cold" in question else {}

    monkeypatch.setattr(manager.composer.exchange, "answer", answer)  # type: ignore[attr-defined]

    async def run() -> list[Any]:
        bodies = [{"cold": 0}, {"cold": 1}, {"cold": "wrong"}, {"cold": 2}, {"unpack": 0}, {"unpack": 1}, {"cold": 3}]
        asked = [asyncio.create_task(ask(manager, body)) for body in bodies]
        rounds = []
        await settled()
        asked[1].cancel()
        while manager.sent:
            rounds.append(manager.sent[0].body)
            await manager.round()
        assert rounds == [{"all": [{"cold": 0}, {"cold": 1}, {"cold": "wrong"}, {"cold": 2}]}, *bodies[4:]]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third, *rest = asyncio.run(run())
    assert (first, rest) == ({"cold": 0}, [{"cold": 2}, {}, {}, {"cold": 3}])
    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(third, ConfigError)


def packed(source: Any, ids: list[int]) -> Parcel:
    """What came from another server."""
    files, form = Files(1), source.form.hex()
    said = source.answer(None, {"pack": ids, "form": form, "into": files.told})
    about = {"tokens": said["tokens"], "kept": said["kept"], "made": True}
    return Parcel({"unpack": ids, "form": form, "from": files.told, **about}, files)


def test_a_parcel_is_there_until_the_scheduler_has_read_it() -> None:
    there, one, other = static(), IDS, [7] * len(IDS)
    entry, _ = there.make(one, 2, seed=1), there.make(other, 2, seed=2)
    source, manager = exchange(there), Manager()

    async def run() -> None:
        leaves = asyncio.create_task(ask(manager, {"who": None}))
        await settled()
        leaves.cancel()
        parcel = packed(source, one)
        (path,) = parcel.files.told["paths"]
        keeping = asyncio.create_task(parcel.keep(manager))
        del parcel
        await manager.round()
        assert os.path.exists(path)
        assert not keeping.done()
        keeping.cancel()
        await settled()
        del keeping
        assert os.path.exists(path), "the scheduler was asked to read it"
        second = packed(source, other)
        assert second.files.told["paths"] != [path]
        await manager.round()
        assert not os.path.exists(path), "it was read"

    asyncio.run(run())
    kept = manager.composer
    found = kept.index.find(kept.identity.key(array("q", one)))
    assert found is not None
    assert kept.read(found) == there.read(entry)
