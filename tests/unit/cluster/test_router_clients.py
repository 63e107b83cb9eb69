"""What clients do wrong, or in another way than others, fills no log and changes no body."""

from __future__ import annotations

import asyncio
import gzip
import logging
from typing import Any

import aiohttp
import pytest
from aiohttp.web import StreamResponse

from sglang_hybrid.cluster import mistakes, router
from tests.unit.cluster.fake import FakeWorker, cluster, until

PATIENCE_S = 60.0
"""For what must not hang."""


async def answer_to(url: str, sent: bytes, lines: int = 0) -> bytes:
    """What comes back until the connection is closed, or so many `lines` of it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(PATIENCE_S):
        told = b"".join([await reader.readline() for _ in range(lines)]) if lines else await reader.read()
    writer.close()
    return told


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the router logs, nothing of this kind having been logged before."""
    [kept] = mistakes.http_logger.filters
    monkeypatch.setattr(kept, "_seldom", mistakes.Seldom())
    caplog.set_level(logging.INFO)
    return caplog


def test_what_is_no_http_is_logged_in_one_line(said: pytest.LogCaptureFixture) -> None:
    bad = [
        b"\0 garbage\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: r\r\nX : y\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: r\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    ]

    async def run() -> None:
        async with cluster(FakeWorker()) as (url, _, _workers):
            for sent in 20 * bad:
                assert b" 400 " in (await answer_to(url, sent)).partition(b"\r\n")[0]

    asyncio.run(run())
    about = [record for record in said.records if record.name == mistakes.http_logger.name]
    assert len(about) == 1, said.text
    assert not any(record.exc_info for record in said.records), said.text


def test_a_client_that_hangs_up_is_not_logged(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(response: Any, _: bytes) -> None:
        response._req.transport.abort()  # the router learns of it while it writes, before it is told
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, workers):
            monkeypatch.setattr(StreamResponse, "write", write)
            with pytest.raises(aiohttp.ClientError):
                async with client.post(url + "/generate", json={"text": "a"}) as answer:
                    await answer.read()
            await until(lambda: workers.all[one.url].running == 0)
            assert not workers.all[one.url].why, "it is not the worker that broke off"

    asyncio.run(run())
    assert not any(record.exc_info for record in said.records), said.text


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, gzip", "odd"])
def test_a_body_stays_as_its_client_encoded_it(encoding: str) -> None:
    plain = b'{"text": "a"}'
    packed = gzip.compress(plain)

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, _):
            for body in (packed, packed[:9], plain):
                async with client.post(url + "/generate", data=body, headers={"Content-Encoding": encoding}) as answer:
                    assert answer.status == 200
                _, headers, arrived = one.requests[-1]
                assert (headers["Content-Encoding"], arrived) == (encoding, body)

    asyncio.run(run())


@pytest.mark.parametrize("more", [b"", b"zz\r\n}\r\n"])
def test_a_body_that_comes_to_nothing_is_answered(more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes slowly may take longer in all: the patience is for what comes next."""
    monkeypatch.setattr(router, "STALLS_S", 0.4)
    head = b"POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, _, _workers):
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            writer.write(head)
            for part in b'{"text": "a"}':
                writer.write(b"1\r\n%c\r\n" % part)
                await asyncio.sleep(0.05)
            writer.write(more)
            async with asyncio.timeout(PATIENCE_S):
                assert b" 408 " in await reader.readline()
            writer.close()
            assert one.requests == []
            assert b" 200 " in await answer_to(url, head + b"2\r\n{}\r\n0\r\n\r\n", 1)

    asyncio.run(run())
