"""Workers that are none: an HTTP server with SGLang's pages, and its channel of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_hybrid.cluster import route
from sglang_hybrid.cluster.pairs import PairRouter
from sglang_hybrid.cluster.peers import Peers
from sglang_hybrid.cluster.router import Router
from sglang_hybrid.cluster.workers import Workers
from sglang_hybrid.routing.index import block_hashes
from sglang_hybrid.routing.looks import ENDING, SERVER

PAGE = 4


class FakeWorker:
    """Remembers every request. `behave` is what it does with the next ones: answer, busy, die, stream, cut, hang; or
    what it answers, from `HTTP/` on."""

    def __init__(
        self, model: str = "m", page: int = PAGE, handler_cancellation: bool = False, server_name: str = "", **info: Any
    ) -> None:
        self.model, self.page, self.info = model, page, info
        self.hung_up, self.delay_s = 0, 0.0
        self.behave, self.well = "answer", True
        self.server_name, self.ending = server_name, False
        """What it says of itself where a router looks."""
        self.proxied = False
        """Whether something stands before it that answers in its place, for it is gone."""
        self.release = asyncio.Event()
        """Ends the requests that hang; they go on as it behaves then."""
        self.looks: list[str] = []
        """Targets by which it was asked for its models, as a router does to see whether it lives."""
        self.seen = asyncio.Event()
        """They are answered while it is set."""
        self.seen.set()
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self._url = ""
        self.server = TestServer(self._application(), handler_cancellation=handler_cancellation)
        self.context = zmq.asyncio.Context()
        self.publisher = self.context.socket(zmq.PUB)
        self.port = self.publisher.bind_to_random_port("tcp://127.0.0.1")
        self.replay = self.context.socket(zmq.ROUTER)
        self.replay_port = self.replay.bind_to_random_port("tcp://127.0.0.1")
        self.number = 0

    def _application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_route("*", "/{path:.*}", self._any)
        return app

    @property
    def url(self) -> str:
        self._url = f"http://127.0.0.1:{self.server.port}" if self.server.port else self._url
        return self._url

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=502 if self.proxied else 200 if self.well else 503)

    async def _models(self, request: web.Request) -> web.Response:
        self.looks.append(request.raw_path)
        await self.seen.wait()
        if self.proxied:
            return web.Response(status=502)
        if not self.well:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"data": []}, headers=self._said())

    def _said(self) -> dict[str, str]:
        told = {SERVER: self.server_name, ENDING: "1" if self.ending else ""}
        return {name: value for name, value in told.items() if value}

    async def _info(self, _: web.Request) -> web.Response:
        told = {
            "endpoint_host": "*",
            "endpoint_port_base": self.port,
            "topic": "",
            "block_size": self.page,
            "dp_size": 1,
        }
        config = json.dumps({"replay_endpoint": f"tcp://*:{self.replay_port}"})
        info = {"model_path": self.model, "kv_events": told, "kv_events_config": config, **self.info}
        return web.json_response(info, headers=self._said())

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = (await request.json())["request"]
        ids = [ord(letter) for letter in json.dumps(asked["body"].get("messages") or asked["body"].get("text"))]
        return web.json_response({"count": len(ids), "names": block_hashes(ids[:-1], asked["page_tokens"])})

    async def _any(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.delay_s)
        # From here to where it hangs nothing is awaited: a test that sees the request may change how the next ones go.
        self.requests.append((request.raw_path, dict(request.headers), await request.read()))
        if self.behave == "hang":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.hung_up += 1
                raise
        if self.behave == "busy":
            return web.json_response({"error": "queue is full"}, status=503)
        if self.behave == "silent":
            response = web.StreamResponse(status=503)
            await response.prepare(request)
            await response.write(b"queue")
            await self.release.wait()
        if self.behave == "die":
            assert request.transport is not None
            request.transport.close()
        if self.behave.startswith("HTTP/"):
            assert request.transport is not None
            request.transport.write(self.behave.encode("latin-1"))
            request.transport.close()
        if self.behave in ("400", "500"):
            return web.json_response({"error": f"{self.behave} of {self.url}"}, status=int(self.behave))
        if self.behave in ("stream", "cut"):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Of": self.url})
            await response.prepare(request)
            for part in range(3):
                await response.write(b"data: %d\n\n" % part)
                await asyncio.sleep(0.01)
                if self.behave == "cut" and part == 1:
                    assert request.transport is not None
                    request.transport.close()
                    return response
            await response.write_eof()
            return response
        return web.json_response({"of": self.url}, headers={"X-Of": self.url})

    async def tell(self, *events: dict[str, Any], number: int | None = None, raw: bytes | None = None) -> None:
        self.number = self.number if number is None else number
        payload = msgspec.msgpack.encode([0.0, list(events), 0]) if raw is None else raw
        await self.publisher.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    async def asked_for_snapshot(self, timeout: float = 20) -> bool:
        return bool(await self.replay.poll(timeout * 1000)) and bool(await self.replay.recv_multipart())

    async def stop(self) -> None:
        await self.server.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def cluster(
    *workers: FakeWorker,
    routing: str = "restart_points",
    api_key: str | None = None,
    max_body_mb: float = 1,
    prefills: int = 0,
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, Workers]]:
    """The address of a router before `workers`, a client, and the router's workers.

    With `prefills` it is a router of pairs: so many of the workers prefill, the others decode.
    """
    for worker in workers:
        await worker.server.start_server(auto_decompress=False)
    async with route.http_session() as session, aiohttp.ClientSession() as client:
        urls = [worker.url for worker in workers]
        peers = Peers.named(urls[:prefills], urls[prefills:]) if prefills else None
        ours = Workers(urls, session, api_key, peers.meet if peers is not None else None)
        router = (
            Router(ours, session, routing, api_key)
            if peers is None
            else PairRouter(ours, session, routing, peers, api_key)
        )
        runner = route.runner_of(router, max_body_mb)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await ours.start()
        port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{port}", client, ours
        finally:
            await client.close()
            await route.drained(runner, router)
            await ours.stop()
            for worker in workers:
                await worker.stop()


async def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    for _ in range(int(seconds / 0.02)):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it does not come to be")
