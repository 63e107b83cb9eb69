"""The router: every request goes, byte for byte, to the worker that a policy chooses, and its answer comes back.

SGLang's own router reads a request into fields that it knows and writes those: cache marks, hints, salts and ids of a
client are gone then (docs/cluster.md). This one forwards what it gets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from hmac import compare_digest
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from sglang_hybrid.cluster.numbers import Numbers
from sglang_hybrid.cluster.prompts import ENDPOINTS, UNKNOWN, Pages, pages_of, session_of
from sglang_hybrid.cluster.workers import Worker, Workers, json_of, reason
from sglang_hybrid.routing.index import NOTHING, Reach
from sglang_hybrid.routing.policies import Offer, Prompt, RoutingPolicy, create

logger = logging.getLogger(__name__)

ANYWHERE = (
    "/v1/models", "/model_info", "/get_model_info", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
    "/v1/messages/count_tokens", "/v1/embeddings", "/encode", "/v1/score", "/v1/rerank", "/v1/classify", "/classify",
)  # fmt: skip
"""Answered by any worker alike."""

EVERYWHERE = ("/flush_cache", "/abort_request")
"""Sent to all workers: it is one of them that has the request, and each has a cache."""

LOST = 1
"""A request whose worker went away in the middle is sent to so many others, lest one that ends servers end all."""

_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
    "upgrade", "host", "content-length",
}  # fmt: skip
BUSY = (429, 502, 503)

NO_PROMPT = Prompt(np.empty(0, dtype=np.int32), (), 1)
"""Of requests whose prompt is not known, or does not matter."""


class Router:
    """Forwards requests to `workers` as the policy called `routing` chooses; `api_key` opens its own pages."""

    def __init__(
        self, workers: Workers, session: aiohttp.ClientSession, routing: str, api_key: str | None = None
    ) -> None:
        self.workers = workers
        self.numbers = Numbers(workers)
        self._session = session
        self._policy: RoutingPolicy = create(routing)
        self._plain: RoutingPolicy = create("sessions")
        self._reads = routing not in ("round_robin", "least_load", "sessions")
        self._api_key = api_key

    def application(self, max_body_mb: float) -> web.Application:
        app = web.Application(client_max_size=int(max_body_mb * 1e6))
        app.router.add_get("/health", self._health)
        app.router.add_get("/workers", self._shown)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._any)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        healthy = len(self.workers.healthy)
        return web.Response(status=200 if healthy else 503, text=f"{healthy} of {len(self.workers.all)} workers\n")

    async def _shown(self, request: web.Request) -> web.Response:
        return self._refusal(request) or web.json_response(self.workers.shown())

    async def _metrics(self, request: web.Request) -> web.Response:
        return self._refusal(request) or web.Response(
            body=self.numbers.text(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if self._api_key is None or compare_digest(given, self._api_key.encode()):
            return None
        return web.json_response({"error": "Unauthorized"}, status=401)

    async def _any(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/") or "/"
        known = path in ENDPOINTS or path in ANYWHERE or path in EVERYWHERE
        if not known:
            workers = ", ".join(self.workers.all)
            return problem(404, f"the router does not know {path}; ask a worker itself: {workers}")
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            return problem(413, f"a body is too large for the router (--max-body-mb): {error.text}")
        if path in EVERYWHERE:
            return await self._everywhere(request, raw)
        body = json_of(raw) if path in ENDPOINTS else None
        return await self._one(request, path, raw, body)

    async def _one(
        self, request: web.Request, path: str, raw: bytes, body: dict[str, Any] | None
    ) -> web.StreamResponse:
        """Send a request to one worker after the other until one answers."""
        began = time.perf_counter()
        headers = forwarded(request.headers)
        pages = await self._pages(path, body, headers)
        left, lost, refused = dict(self.workers.all), 0, None
        while lost <= LOST:
            able = {url: worker for url, worker in left.items() if worker.healthy}
            if not able:
                break
            worker, reach, tokens = self._choose(path, body, pages, able)
            del left[worker.url]
            response = web.StreamResponse()
            with self._under_way(worker, tokens) as first:
                if path in ENDPOINTS:
                    self.numbers.routed(time.perf_counter() - began, pages, reach)
                try:
                    async with (
                        until_gone(worker),
                        self._session.request(
                            request.method,
                            worker.url + request.raw_path,
                            data=raw or None,
                            headers=headers,
                            allow_redirects=False,
                        ) as answer,
                    ):
                        if answer.status in BUSY and left:
                            refused = (answer.status, await answer.read(), forwarded(answer.headers))
                            self.numbers.retries.inc()
                            continue
                        response.set_status(answer.status, answer.reason)
                        response.headers.update(forwarded(answer.headers))
                        response.content_length = answer.content_length
                        await response.prepare(request)
                        async for chunk in answer.content.iter_any():
                            first()
                            await response.write(chunk)
                        await response.write_eof()
                        return response
                except aiohttp.ClientConnectorError as error:
                    self.workers.failed(worker, reason(error))
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                    if request.transport is None or request.transport.is_closing():
                        raise  # it was the client that went
                    self.workers.failed(worker, f"it broke off an answer: {error or type(error).__name__}")
                    if response.prepared:  # its beginning is out
                        if request.transport is not None:
                            request.transport.close()
                        return response
                    lost += 1
                self.numbers.retries.inc()
        if refused is not None:
            return web.Response(status=refused[0], body=refused[1], headers=refused[2])
        whys = "; ".join(f"{worker}: {worker.why}" for worker in self.workers.all.values() if worker.why)
        return problem(503, f"no worker can take the request: {whys or 'all were tried'}")

    async def _pages(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Pages:
        index, healthy = self.workers.index, self.workers.healthy
        if not self._reads or body is None or index is None or len(healthy) < 2:
            return UNKNOWN
        reader = min(healthy, key=lambda worker: (worker.running, worker.sent))
        plain = {name: value for name, value in headers.items() if name.lower() == "authorization"}
        return await pages_of(path, body, index.page_tokens, reader, self._session, plain)

    def _choose(
        self, path: str, body: dict[str, Any] | None, pages: Pages, able: Mapping[str, Worker]
    ) -> tuple[Worker, Reach, int]:
        """The worker that gets a request, what it is known to have of the prompt, and tokens it has to compute.

        The last counts what is on its way, which is not known yet.
        """
        index = self.workers.index
        reaches = index.reaches_of(pages.names) if index is not None and pages.names else {}
        offers = {
            url: Offer(reaches.get(url, NOTHING), worker.waiting_tokens, worker.running) for url, worker in able.items()
        }
        prompt, policy = NO_PROMPT._replace(session=session_of(body)), self._plain
        if pages.tokens and index is not None:
            tokens = np.empty(pages.tokens, dtype=np.int32)
            prompt = Prompt(tokens, pages.names, index.page_tokens, prompt.session)
            policy = self._policy
        elif path in ENDPOINTS and not self._reads:
            policy = self._policy
        chosen = policy.choose(prompt, offers)
        return able[chosen], offers[chosen].reach, max(0, policy.left_tokens)

    @contextmanager
    def _under_way(self, worker: Worker, tokens: int) -> Iterator[Callable[[], None]]:
        """Count a request at `worker`; the function it yields says that the first token has come."""
        waits = tokens

        def first() -> None:
            nonlocal waits
            worker.waiting_tokens -= waits
            waits = 0

        worker.running += 1
        worker.sent += 1
        worker.waiting_tokens += waits
        try:
            yield first
        finally:
            worker.running -= 1
            first()

    async def _everywhere(self, request: web.Request, raw: bytes) -> web.Response:
        headers = forwarded(request.headers)

        async def send(worker: Worker) -> tuple[int, str]:
            try:
                async with self._session.request(
                    request.method, worker.url + request.raw_path, data=raw, headers=headers
                ) as answer:
                    return answer.status, await answer.text()
            except (aiohttp.ClientError, OSError) as error:
                return 502, str(error)

        workers = list(self.workers.all.values())
        answers = await asyncio.gather(*(send(worker) for worker in workers))
        told = {worker.url: text for worker, (_, text) in zip(workers, answers, strict=True)}
        return web.json_response(told, status=max(status for status, _ in answers))


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
    """Those that are not between two neighbours."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return {name: value for name, value in headers.items() if name.lower() not in _HOP | named}


def problem(status: int, message: str) -> web.Response:
    return web.json_response(
        {"object": "error", "message": message, "error": {"message": message, "code": status}}, status=status
    )
