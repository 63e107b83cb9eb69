"""The router of pairs: one server computes the prompt, another the answer (docs/pd.md).

Both get the request at once, under a room number. The policy chooses who prefills, for there the cache is; the load
chooses who decodes. What decodes answers the client. What prefills answers nobody: its answer says that it is done, or
what went wrong.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any

import aiohttp
from aiohttp import web

from sglang_hybrid.cluster.answers import BUSY, Begun, Failure, Part, error_of, forwarded, problem, until_gone
from sglang_hybrid.cluster.handover import HEADER, IN_HEADERS, Room, appended, refusal
from sglang_hybrid.cluster.peers import DECODE, PREFILL, Peers
from sglang_hybrid.cluster.prompts import ENDPOINTS, Pages, session_of
from sglang_hybrid.cluster.router import LOST, NO_PROMPT, Router
from sglang_hybrid.cluster.worker import Worker, in_time
from sglang_hybrid.cluster.workers import Workers
from sglang_hybrid.routing.index import NOTHING, Reach
from sglang_hybrid.routing.policies import Offer

logger = logging.getLogger(__name__)

LEAVE_S = 5.0
"""For a server to say that it has prefilled, once the whole answer is out."""

BLAME_S = 1.0
"""For a server that prefills to fail as well, once the other one has: then it is to blame."""


class PairRouter(Router):
    """Sends every request with a prompt to a server that prefills and to one that decodes."""

    def __init__(
        self, workers: Workers, session: aiohttp.ClientSession, routing: str, peers: Peers, api_key: str | None
    ) -> None:
        super().__init__(workers, session, routing, api_key)
        self._peers = peers
        for worker in workers.all.values():
            worker.role = peers.role(worker.url)
        self._leaving: set[asyncio.Task[Any]] = set()

    async def _health(self, _: web.Request) -> web.Response:
        there = {role: sum(worker.role == role for worker in self.workers.healthy) for role in (PREFILL, DECODE)}
        text = " and ".join(f"{count} that {role}" for role, count in there.items())
        return web.Response(status=200 if all(there.values()) else 503, text=f"{text}\n")

    async def _one(
        self, request: web.Request, path: str, raw: bytes, body: dict[str, Any] | None
    ) -> web.StreamResponse:
        """Send a request to one pair after the other until one answers."""
        if path not in ENDPOINTS:
            return await super()._one(request, path, raw, body)
        if (refused := refusal(path, body)) is not None or body is None:
            return problem(*(refused or (400, "no body")))
        began, left, lost = time.perf_counter(), dict(self.workers.all), 0
        given = forwarded(request.headers)
        headers = {name: value for name, value in given.items() if not name.lower().startswith(HEADER.lower())}
        pages, session = await self._pages(path, body, headers), session_of(body)
        most = max((self._peers.most_tokens(url) for url in left if self._peers.role(url) == DECODE), default=math.inf)
        if pages.tokens > most:
            return problem(
                400,
                f"a prompt has at most {most} tokens, so much do the servers that decode find room for beside "
                f"--num-reserved-decode-tokens; send less: {pages.tokens}",
            )
        failure: Failure | None = None
        while lost <= LOST and (pair := self._pair(path, session, pages, left)) is not None:
            prefill, decode, reach, tokens = pair
            self.numbers.retries.inc(failure is not None)
            self.numbers.routed(time.perf_counter() - began, pages, reach)
            room = Room.new(*self._peers.bootstrap(prefill.url))
            fields = {} if path in IN_HEADERS else room.fields()
            sent = {**headers, **room.headers()} if path in IN_HEADERS else headers
            # An error in a stream has status 200: from what prefills, which nobody listens to, none is wanted.
            prefills = Part(prefill, appended(raw, body, {**fields, "stream": False}), sent)
            decodes = Part(decode, appended(raw, body, fields) if fields else raw, sent)
            outcome = await self._try(request, prefills, decodes, tokens)
            if not isinstance(outcome, Failure):
                return outcome
            failure = outcome
            if failure.final:
                break
            del left[failure.worker.url]
            lost += failure.lost
        return self._nobody(request, failure, "pair of servers")

    def _pair(
        self, path: str, session: str | None, pages: Pages, left: dict[str, Worker]
    ) -> tuple[Worker, Worker, Reach, int] | None:
        able = {url: worker for url, worker in left.items() if worker.healthy}
        prefills = {url: worker for url, worker in able.items() if worker.role == PREFILL}
        decodes = {
            url: worker
            for url, worker in able.items()
            if worker.role == DECODE and pages.tokens <= self._peers.most_tokens(url)
        }
        if not prefills or not decodes:
            return None
        prefill, reach, tokens = self._choose(path, session, pages, prefills)
        loads = {url: Offer(NOTHING, 0, worker.running) for url, worker in in_time(decodes).items()}
        decode = able[self._plain.choose(NO_PROMPT, loads)]
        return prefill, decode, reach, tokens

    async def _try(
        self, request: web.Request, prefills: Part, decodes: Part, tokens: int
    ) -> web.StreamResponse | Failure:
        """The answer of a pair, or what kept it from one; whatever happens, no request of it is left running."""
        prefilling = asyncio.create_task(self._prefilled(request, prefills, tokens))
        decoding = asyncio.create_task(self._answers.begun(request, decodes, errors_are_final=False))
        leaves = False
        try:
            with self._under_way(decodes.worker, 0):
                await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
                if not decoding.done():
                    if (failure := prefilling.result()) is not None:
                        return failure
                    await asyncio.wait({decoding})
                begun = decoding.result()
                if isinstance(begun, Failure):
                    # Without its prompt a server fails as well, and which of the two says so first is chance.
                    await asyncio.wait({prefilling}, timeout=BLAME_S if begun.blames else 0)
                    failure = prefilling.result() if prefilling.done() else None
                    return failure or begun
                response = await self._answers.forward(request, decodes.worker, begun)
                leaves = response.status < 400
                return response
        finally:
            if leaves and not prefilling.done():
                self._leave(prefilling)
            else:
                prefilling.cancel()
            decoding.cancel()
            if decoding.done() and not decoding.cancelled() and decoding.exception() is None:
                left = decoding.result()
                if isinstance(left, Begun):
                    left.answer.close()

    def _leave(self, prefilling: asyncio.Task[Failure | None]) -> None:
        """Let a server end its part that has nothing left to do but to say so."""

        async def leave() -> None:
            await asyncio.wait({prefilling}, timeout=LEAVE_S)
            prefilling.cancel()

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _prefilled(self, request: web.Request, part: Part, tokens: int) -> Failure | None:
        """None once the prompt is computed and handed over."""
        worker = part.worker
        with self._under_way(worker, tokens):
            try:
                async with until_gone(worker), self._answers.ask(request, part) as answer:
                    said = await (answer.read() if answer.status < 400 else error_of(answer))
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                return self._answers.gone(worker, error, "a prefill")
        if answer.status < 400:
            return None
        headers = forwarded(answer.headers)
        told = web.Response(status=answer.status, body=said, headers=headers)
        if answer.status in BUSY:
            return Failure(worker, False, told)
        if answer.status < 500:
            return Failure(worker, False, told, final=True)
        text = said[:300].decode(errors="replace")
        told = problem(502, f"the server that prefills failed: {worker} answers {answer.status} {text}")
        return Failure(worker, True, told)
