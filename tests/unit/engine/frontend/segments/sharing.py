"""A server that shares the segments of prompts out, with others that do as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend.segments import parallel, warming
from sglang_hybrid.engine.frontend.segments.parallel import Parallel
from sglang_hybrid.engine.frontend.segments.peers import Offer, Peer

WHO = {"server": "here", "form": "f", "ranks": 1}


def document(number: int, tokens: int = 400) -> list[int]:
    return [number * 1000 + token for token in range(tokens)]


def prompt(*documents: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    ids, ranges = [1, 2, 3], []
    for each in documents:
        ranges.append((len(ids), len(ids) + len(each)))
        ids = ids + each
    return [*ids, 4], ranges


class Other(Peer):
    """A server that computes what it is asked for at once, or does what a test wants it to."""

    def __init__(self, held: Callable[[str], bool] = lambda _: False, waiting: int = 0, server: str = "there") -> None:
        super().__init__("http://there", None)
        self.held, self.waiting, self.server = held, waiting, server
        self.probes, self.asked = 0, list[list[int]]()
        self.does: Callable[[], Any] = lambda: asyncio.sleep(0)

    async def probe(self, session: Any, server: str, form: str, names: list[str]) -> Any:
        self.probes += 1
        if server == self.server:
            self.be_self()
            return None
        return Offer([self.held(each) for each in names], self.waiting, None)

    async def send(self, session: Any, who: Any, ids: list[int], tenant: Any) -> Any:
        self.asked.append(ids)
        await self.does()
        return SimpleNamespace(keep=self.keep)

    async def keep(self, _: Any) -> None:
        pass


class Server:
    """This server: what its scheduler is asked, and what it computes ahead."""

    def __init__(self, *others: Other, kept: list[list[int]] | None = None) -> None:
        self.parallel = Parallel(others)
        self.manager = SimpleNamespace(rid_to_state={})
        self.kept, self.questions, self.computed = kept or [], 0, list[list[int]]()

    async def ask(self, _: Any, question: dict[str, Any]) -> dict[str, Any]:
        if "who" in question:
            return WHO
        self.questions += 1
        ids = question["ids"]
        return {
            **WHO,
            "cold": [at for at, (low, high) in enumerate(question["cold"]) if ids[low:high] not in self.kept],
        }

    async def warm(self, _: Any, body: Any, *, ahead: bool) -> None:
        assert ahead
        self.computed += body["segments"]

    def run(self, *documents: list[int], **tenant: str) -> None:
        asyncio.run(self.have(*documents, **tenant))

    async def have(self, *documents: list[int], **tenant: str) -> None:
        await self.parallel.prepare(self.manager, *prompt(*documents), tenant)


def served(monkeypatch: pytest.MonkeyPatch, *others: Other, **more: Any) -> Server:
    """A server whose scheduler's answers are a fake's."""
    server = Server(*others, **more)
    monkeypatch.setattr(parallel, "ask", server.ask)
    monkeypatch.setattr(warming, "warm", server.warm)
    return server
