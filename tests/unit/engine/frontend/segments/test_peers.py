"""What comes over the wire from another server: an entry, an offer, or anything."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.segments import peers
from sglang_hybrid.engine.frontend.segments.files import Files
from sglang_hybrid.engine.frontend.segments.peers import NotKept, Offer, Parcel, Peer, Refused

pytestmark = pytest.mark.skipif(not compat.complete(), reason="segments are refused before the start with this SGLang")

WHO = {"server": "here", "form": "f", "ranks": 1, "sizes": [100, 0.5]}
IDS = list(range(400))


class Wire:
    """A server that answers as a test says."""

    def __init__(self, answer: Callable[[web.Request], Any]) -> None:
        self.answer = answer

    def call(self, do: Callable[[Peer, aiohttp.ClientSession], Any]) -> Any:
        async def run() -> Any:
            app = web.Application()

            async def handle(request: web.Request) -> Any:
                return await self.answer(request)

            app.router.add_post("/{path:.*}", handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            try:
                async with aiohttp.ClientSession() as session:
                    return await do(Peer(f"http://127.0.0.1:{port}", "a-key"), session)
            finally:
                await runner.cleanup()

        return asyncio.run(run())


HEAD = json.dumps({"tokens": 384, "kept": 2, "bytes": 5, "made": True, "seconds": 0.1}).encode()


def headed(**changed: Any) -> bytes:
    head = json.dumps({**json.loads(HEAD), **changed}).encode()
    return len(head).to_bytes(4, "little") + head


def fetched(
    body: bytes, monkeypatch: pytest.MonkeyPatch, status: int = 200, unpacked: dict[str, Any] | None = None
) -> Any:
    """What this server's scheduler is asked to keep, after another one sent `body`."""
    questions: list[Any] = []

    async def ask(_: Any, question: dict[str, Any], __: Any) -> dict[str, Any]:
        questions.append((question, Path(question["from"]["paths"][0]).read_bytes()))
        return unpacked or {}

    monkeypatch.setattr(peers, "ask", ask)

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer a-key"
        assert request.path == "/hybrid/segments/parcel"
        assert await request.json() == {"form": "f", "segment": IDS, "cache_salt": "s"}
        return web.Response(body=body, status=status)

    async def fetch(peer: Peer, session: aiohttp.ClientSession) -> None:
        await (await peer.send(session, WHO, IDS, {"cache_salt": "s"})).keep(None)

    Wire(answer).call(fetch)
    return questions


def test_a_parcel_becomes_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    ((question, data),) = fetched(len(HEAD).to_bytes(4, "little") + HEAD + b"bytes", monkeypatch)
    assert data == b"bytes"
    kept = {key: question[key] for key in ("unpack", "form", "tokens", "kept", "made", "cache_salt")}
    assert kept == {
        "unpack": IDS, "form": "f", "tokens": 384, "kept": 2, "made": True, "cache_salt": "s",
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xff\xff\xff",
        (4).to_bytes(4, "little") + b"null",
        (4).to_bytes(4, "little") + b"{{{{",
        (2).to_bytes(4, "little") + b"{}",
        len(HEAD).to_bytes(4, "little") + HEAD + b"byt",
        headed(bytes=0),
        headed(bytes=-5) + b"bytes",
        headed(tokens="many") + b"bytes",
    ],
)
def test_what_is_no_parcel_is_an_error_and_nothing_is_kept(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((Refused, EOFError, ValueError, KeyError, TypeError)):
        fetched(body, monkeypatch)


def test_no_more_is_read_than_an_entry_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(headed(bytes=300) + bytes(300), monkeypatch)
    monkeypatch.setattr(Files, "fill", lambda *_: pytest.fail("it is read"))
    for size in (301, 1 << 40):
        with pytest.raises(Refused, match=f"a parcel of {size} bytes, which has 300.0 at most"):
            fetched(headed(bytes=size) + bytes(301), monkeypatch)


def memory() -> list[str]:
    """The files in memory that this process has open."""
    links = (os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))
    return [link for link in links if link.startswith("/memfd:segment")]


@pytest.mark.parametrize("unpacked", [{}, {"why": "worth less"}, None])
def test_memory_is_given_back_whatever_becomes_of_a_parcel(
    unpacked: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_: Any, __: Any, files: Files) -> dict[str, Any]:
        if unpacked is None:
            raise ConfigError("no such question")
        return unpacked

    async def keep() -> tuple[Any, Files]:
        parcel = Parcel({}, Files(2))
        assert len(memory()) == 2
        return await asyncio.gather(parcel.keep(None), return_exceptions=True), parcel.files

    monkeypatch.setattr(peers, "ask", ask)
    held = asyncio.run(keep())
    assert memory() == [], "though somebody may hold it"
    del held


def test_memory_of_what_ends_early_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EOFError) as held:
        fetched(headed(bytes=5) + b"byt", monkeypatch)
    assert memory() == [], "though somebody holds the error"
    del held


def test_refusals_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="503 no room"):
        fetched(b"no room", monkeypatch, status=503)
    with pytest.raises(NotKept, match="worth less"):
        fetched(len(HEAD).to_bytes(4, "little") + HEAD + b"bytes", monkeypatch, unpacked={"why": "worth less"})


def probed(answer: Callable[[web.Request], Any]) -> tuple[Any, Peer]:
    async def do(peer: Peer, session: aiohttp.ClientSession) -> tuple[Any, Peer]:
        return await peer.probe(session, "here", "f", ["n"]), peer

    found: tuple[Any, Peer] = Wire(answer).call(do)
    return found


class Clock:
    """A time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: self.now))

    def out(self, peer: Peer) -> float:
        """Seconds that a peer is left alone, from now."""
        before = self.now
        while peer.is_out:
            self.now += 1
        found, self.now = self.now - before, before
        return found


SAID = {"server": "there", "form": "f", "held": [True], "waiting": 3, "pace": 0.1}


def test_a_server_that_answers_and_sends_nothing_is_left_alone_ever_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(SAID) if request.path.endswith("probe") else web.Response(status=503)

    async def do(peer: Peer, session: aiohttp.ClientSession) -> list[float]:
        pauses = []
        for _ in range(7):
            assert await peer.probe(session, "here", "f", ["n"]) is not None
            with pytest.raises(Refused) as refused:
                await peer.send(session, WHO, IDS, {})
            peer.fail(refused.value, clock.now)
            pauses.append(clock.out(peer))
            clock.now += pauses[-1]
        return pauses

    assert Wire(answer).call(do) == [5, 10, 20, 40, 80, 120, 120]


def test_what_fails_beside_others_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, peer = Clock(monkeypatch), Peer("http://a", None)
    for _ in range(8):
        peer.fail(TimeoutError(), clock.now)
    assert clock.out(peer) == 5
    clock.now = 1005.0
    peer.fail(TimeoutError(), 999.0)
    assert not peer.is_out, "it began before the failure that is known"
    peer.fail(TimeoutError(), 1005.0)
    assert clock.out(peer) == 10


def test_what_began_before_it_worked_puts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, peer = Clock(monkeypatch), Peer("http://a", None)
    peer.fail(TimeoutError(), 999.0)
    clock.now = 1060.0
    peer.worked()
    peer.fail(TimeoutError(), 1001.0)
    assert (peer.is_out, peer.why, peer.fetched) == (False, "", 1)
    peer.fail(TimeoutError(), 1061.0)
    assert clock.out(peer) == 5


def test_what_was_this_server_may_become_another(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {**SAID, "server": "here"}
    clock = Clock(monkeypatch)

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    async def do(peer: Peer, session: aiohttp.ClientSession) -> None:
        assert await peer.probe(session, "here", "f", ["n"]) is None
        assert (peer.is_self, peer.why, clock.out(peer)) == (True, "", 120)
        clock.now += 120
        said["server"] = "there"
        assert await peer.probe(session, "here", "f", ["n"]) is not None
        assert not peer.is_self

    Wire(answer).call(do)


def test_a_probe_tells_what_another_has() -> None:
    said, peer = probed(lambda _: _json(SAID))
    assert said == Offer([True], 3, 0.1)
    assert peer.way.value is not None
    assert not peer.is_out
    nothing, itself = probed(lambda _: _json({**SAID, "server": "here"}))
    assert nothing is None
    assert itself.is_self


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: _json({**SAID, "form": "g"}), "differ: g is not f"),
        (lambda _: _json({**SAID, "held": []}), "an offer is of 1 segments"),
        (lambda _: _json({**SAID, "waiting": -1}), "an offer is of 1 segments"),
        (lambda _: _json({**SAID, "pace": 0}), "an offer is of 1 segments"),
        (lambda _: _json({**SAID, "pace": []}), "TypeError"),
        (lambda _: _json({}), "KeyError"),
        (lambda _: _json([]), ""),
        (lambda _: _json(None), ""),
        (lambda _: _text("<html>", 200), ""),
        (lambda _: _said(json.dumps(SAID).replace("3", "1" + 400 * "0")), "OverflowError"),
        (lambda _: _said("[" * 100_000), "RecursionError"),
        (lambda _: _text("who are you", 401), "401 who are you"),
        (lambda _: asyncio.sleep(3600), "TimeoutError"),
    ],
)
def test_a_probe_that_says_nothing_useful(
    answer: Callable[[web.Request], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PROBE_S", 0.2)
    said, peer = probed(answer)
    assert said is None
    assert peer.is_out
    assert why in peer.why


async def _json(said: Any) -> web.Response:
    return web.json_response(said)


async def _text(said: str, status: int) -> web.Response:
    return web.Response(text=said, status=status)


async def _said(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/json")
