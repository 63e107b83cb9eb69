"""The router: every request goes, byte for byte, to the worker that a policy chooses, and its answer comes back.

SGLang's own router reads a request into fields that it knows and writes those: cache marks, hints, salts and ids of a
client are gone then (docs/cluster.md). This one forwards what it gets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hmac import compare_digest
from typing import Any

import aiohttp
from aiohttp import web

from sglang_hybrid.cluster.answers import Answers, Begun, Failure, Part, forwarded, problem, until_gone
from sglang_hybrid.cluster.failures import reason
from sglang_hybrid.cluster.numbers import Numbers
from sglang_hybrid.cluster.prompts import ENDPOINTS, UNKNOWN, Pages, json_of, pages_of, session_of
from sglang_hybrid.cluster.worker import Worker, in_time
from sglang_hybrid.cluster.workers import Workers
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

EVERYWHERE_S = 10.0
"""For such an answer of a worker, beside the time that the request itself says it waits."""

TRY_S = 1.5
"""The same of one that is out."""

STALLS_S = 60.0
"""For the next bytes of a body. aiohttp tells nobody of a chunk that it cannot read, behind one that it could."""

NO_PROMPT = Prompt(0, (), 1)
"""Of requests whose prompt is not known, or does not matter."""


class Router:
    """Forwards requests to `workers` as the policy called `routing` chooses; `api_key` opens its own pages."""

    def __init__(
        self, workers: Workers, session: aiohttp.ClientSession, routing: str, api_key: str | None = None
    ) -> None:
        self.workers = workers
        self.numbers = Numbers(workers)
        self._session = session
        self._answers = Answers(workers, session)
        self._policy: RoutingPolicy = create(routing)
        self._plain: RoutingPolicy = create("sessions")
        self._reads = routing not in ("round_robin", "least_load", "sessions")
        self._api_key = api_key
        self._arriving: set[asyncio.Transport | None] = set()

    def application(self, max_body_mb: float) -> web.Application:
        app = web.Application(client_max_size=int(max_body_mb * 1e6))
        app.router.add_get("/health", self._health)
        app.router.add_get("/workers", self._shown)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._any)
        return app

    async def hang_up(self, patience_s: float) -> None:
        """Close the connections of requests whose bodies are not there in time: their rest may never come."""
        await asyncio.sleep(patience_s)
        for connection in list(self._arriving):
            if connection is not None:
                connection.close()

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
        target = request.raw_path
        if not (target.startswith("/") and target.isascii() and target.isprintable()):
            # Behind a worker's address anything else could name another host, or none.
            return problem(400, "a request's target is a path: GET /v1/models, not GET http://HOST/v1/models")
        path = request.path.rstrip("/") or "/"
        known = path in ENDPOINTS or path in ANYWHERE or path in EVERYWHERE
        if not known:
            workers = "" if self._refusal(request) else ": " + ", ".join(self.workers.all)
            return problem(404, f"the router does not know {path}; ask a worker itself{workers}")
        connection = request.transport
        self._arriving.add(connection)
        try:
            raw = await body_of(request)
        except web.HTTPRequestEntityTooLarge as error:
            return problem(413, f"a body is too large for the router (--max-body-mb): {error.text}")
        except TimeoutError:
            return problem(408, f"nothing more of the body came for {STALLS_S:.0f} s, or no chunk that can be read")
        finally:
            self._arriving.discard(connection)
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
        pages, session = await self._pages(path, body, headers), session_of(body)
        left, lost = dict(self.workers.all), 0
        failure: Failure | None = None
        while lost <= LOST and (able := {url: worker for url, worker in left.items() if worker.healthy}):
            worker, reach, tokens = self._choose(path, session, pages, able)
            del left[worker.url]
            self.numbers.retries.inc(failure is not None)
            with self._under_way(worker, tokens) as first:
                if path in ENDPOINTS:
                    self.numbers.routed(time.perf_counter() - began, pages, reach)
                begun = await self._answers.begun(request, Part(worker, raw, headers), errors_are_final=True)
                first()
                if isinstance(begun, Begun):
                    return await self._answers.forward(request, worker, begun)
            failure = begun
            if failure.final:
                break
            lost += failure.lost
        return self._nobody(request, failure, "worker")

    def _nobody(self, request: web.Request, failure: Failure | None, who: str) -> web.Response:
        """What a client is told whose request nobody took; addresses are for those who may see /workers."""
        if failure is not None and failure.answer is not None:
            return failure.answer
        whys = ""
        if self._refusal(request) is None:
            told = {url: f"{url}: {worker.why}" for url, worker in self.workers.all.items() if worker.why}
            if failure is not None and failure.why:  # one that broke off may be in again
                told[failure.worker.url] = failure.why
            whys = "; ".join(told.values())
        return problem(503, f"no {who} can take the request: {whys or 'all were tried'}")

    async def _pages(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Pages:
        index, healthy = self.workers.index, self.workers.healthy
        if not self._reads or body is None or index is None or len(healthy) < 2:
            return UNKNOWN
        # One that hangs keeps the prompts that it was asked for before it is known to hang, and gets no others.
        reader = min(healthy, key=lambda worker: (worker.missed, worker.reading, worker.running, worker.sent))
        plain = {name: value for name, value in headers.items() if name.lower() == "authorization"}
        reader.reading += 1
        try:
            return await pages_of(path, body, index.page_tokens, reader, self._session, plain)
        finally:
            reader.reading -= 1

    def _choose(
        self, path: str, session: str | None, pages: Pages, able: Mapping[str, Worker]
    ) -> tuple[Worker, Reach, int]:
        """The worker that gets a request of `session`, what it is known to have of the prompt, and tokens to compute.

        The last counts what is on its way, which is not known yet.
        """
        index = self.workers.index
        reaches = index.reaches_of(pages.names) if index is not None and pages.names else {}
        named = {worker.name: worker for worker in in_time(able).values()}
        offers = {
            name: Offer(reaches.get(worker.url, NOTHING), worker.waiting_tokens, worker.running, worker.full)
            for name, worker in named.items()
        }
        prompt, policy = NO_PROMPT._replace(session=session), self._plain
        if pages.tokens and index is not None:
            prompt = Prompt(pages.tokens, pages.names, index.page_tokens, session)
            policy = self._policy
        elif path in ENDPOINTS and not self._reads:
            policy = self._policy
        chosen = policy.choose(prompt, offers)
        return named[chosen], offers[chosen].reach, max(0, policy.left_tokens)

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
        """All answers; a worker that does not give one counts as 502, and says why."""
        headers, patience_s = forwarded(request.headers), EVERYWHERE_S + waits_s(request)

        async def send(worker: Worker) -> tuple[int, str]:
            try:
                limit = asyncio.timeout(patience_s if worker.there else TRY_S)
                async with limit, until_gone(worker), self._answers.ask(request, Part(worker, raw, headers)) as answer:
                    return answer.status, await answer.text(errors="replace")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                return 502, worker.why or reason(error)

        workers = list(self.workers.all.values())
        answers = await asyncio.gather(*(send(worker) for worker in workers))
        told = {worker.url: text for worker, (_, text) in zip(workers, answers, strict=True)}
        return web.json_response(told, status=max(status for status, _ in answers))


async def body_of(request: web.Request) -> bytes:
    """All of it; raises TimeoutError where no more comes, and HTTPRequestEntityTooLarge."""
    body, most = bytearray(), request.client_max_size
    while True:
        async with asyncio.timeout(STALLS_S):
            chunk = await request.content.readany()
        if not chunk:
            return bytes(body)
        body += chunk
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(body))


def waits_s(request: web.Request) -> float:
    """How long `/flush_cache?timeout=` lets a worker wait for its requests to end; an hour at most."""
    try:
        return min(max(0.0, float(request.query.get("timeout", "0"))), 3600.0)
    except ValueError:  # the worker will say what is wrong with it
        return 0.0
