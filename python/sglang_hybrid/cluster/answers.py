"""The two halves of an answer: until its first bytes are there another worker can give it, behind them nobody can."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from sglang_hybrid.cluster.failures import reason, router_is_short
from sglang_hybrid.cluster.worker import Worker
from sglang_hybrid.cluster.workers import Workers

BUSY = (429, 502, 503)
"""Of a worker that cannot take a request now."""

ERROR_BYTES = 1 << 20
ERROR_S = 5.0
"""For the body of an error: the request goes to another worker behind it, and it need never end."""

_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
    "upgrade", "host", "content-length",
}  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class Part(NamedTuple):
    """A request as it goes to one worker."""

    worker: Worker
    raw: bytes
    headers: dict[str, str]


class Begun(NamedTuple):
    """An answer whose first bytes, `chunk`, are there."""

    answer: aiohttp.ClientResponse
    chunk: bytes


class Failure(NamedTuple):
    """`worker` could not do its part, for it is gone (`why`) or said so (`answer`); `lost` if it was begun.

    It is `final` where the request is to blame, and `blames` where it may be the other server of a pair.
    """

    worker: Worker
    lost: bool
    answer: web.Response | None = None
    why: str = ""
    final: bool = False
    blames: bool = False


class Answers:
    """Asks `workers` over `session`."""

    def __init__(self, workers: Workers, session: aiohttp.ClientSession) -> None:
        self._workers = workers
        self._session = session

    def ask(self, request: web.Request, part: Part) -> Any:
        """`request` to the worker of `part`: a context manager of its answer."""
        url = URL(part.worker.url + request.raw_path, encoded=True)  # as it came: nothing is quoted anew
        data = part.raw or None
        return self._session.request(request.method, url, data=data, headers=part.headers, allow_redirects=False)

    async def begun(self, request: web.Request, part: Part, *, errors_are_final: bool) -> Begun | Failure:
        """The answer with its first bytes. A 5xx is an answer as others are, unless errors are not final."""
        worker = part.worker
        try:
            async with until_gone(worker):
                answer = await self.ask(request, part)
                try:
                    busy = answer.status in BUSY
                    if busy or (answer.status >= 500 and not errors_are_final):
                        body = await error_of(answer)
                        told = web.Response(status=answer.status, body=body, headers=forwarded(answer.headers))
                        return Failure(worker, not busy, told, blames=not busy)
                    return Begun(answer, await answer.content.readany())
                except BaseException:
                    answer.close()
                    raise
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            return self.gone(worker, error, "an answer")

    async def forward(self, request: web.Request, worker: Worker, begun: Begun) -> web.StreamResponse:
        """The rest of an answer, to the client; when it breaks off, it does so for the client too."""
        answer, response = begun.answer, web.StreamResponse()
        response.set_status(answer.status)  # its phrase may have characters that end the answer, and nobody reads it
        response.headers.update(forwarded(answer.headers))
        response.content_length = answer.content_length
        try:
            await response.prepare(request)
            async with until_gone(worker):
                await response.write(begun.chunk)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if request.transport is None or request.transport.is_closing():
                return response  # it was the client that went
            self.gone(worker, error, "an answer")
            request.transport.close()
            return response
        finally:
            answer.close()  # or give it back to the pool, where all of it was read
        await response.write_eof()
        return response

    def gone(self, worker: Worker, error: Exception, what: str) -> Failure:
        """`worker` is out for now, as `error` tells: it was not reached, or broke off `what`.

        Only where nobody listens are its other requests ended at once; else a look decides.
        """
        if isinstance(error, aiohttp.InvalidURL):
            return Failure(worker, False, problem(400, f"the router cannot send this target: {error}"), final=True)
        why = reason(error)
        if router_is_short(error):
            said = f"the router cannot reach a worker now: {why}"
            return Failure(worker, lost=False, answer=problem(503, said), why=said, final=True)
        if isinstance(error, aiohttp.ClientConnectorError):
            self._workers.failed(worker, why)
            return Failure(worker, lost=False, why=f"{worker}: {why}")
        self._workers.doubt(worker, why if isinstance(error, TimeoutError) else f"it broke off {what}: {why}")
        return Failure(worker, lost=True, why=f"{worker}: {worker.why}")


async def error_of(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an error, which is kept while other workers are asked: no more than what comes in time, cut."""
    body = bytearray()
    with suppress(TimeoutError):
        async with asyncio.timeout(ERROR_S):
            while len(body) < ERROR_BYTES and (chunk := await answer.content.readany()):
                body += chunk
    answer.close()  # or give it back to the pool, where all of it was read
    return bytes(body[:ERROR_BYTES])


@asynccontextmanager
async def until_gone(worker: Worker) -> AsyncIterator[None]:
    """Ends with TimeoutError when `worker` is found to be gone."""
    async with asyncio.timeout(None) as deadline:
        worker.deadlines.add(deadline)
        try:
            yield
        finally:
            worker.deadlines.discard(deadline)


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that are not between two neighbours, without control characters, on which aiohttp would end the answer."""
    between = _HOP | {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return {name: _CONTROL.sub("", value) for name, value in headers.items() if name.lower() not in between}


def problem(status: int, message: str) -> web.Response:
    return web.json_response(
        {"object": "error", "message": message, "error": {"message": message, "code": status}}, status=status
    )
