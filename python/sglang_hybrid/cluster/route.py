"""`sglang-hybrid route`: a router before servers that run already."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine

import aiohttp
from aiohttp import web

from sglang_hybrid.cluster.mistakes import http_logger
from sglang_hybrid.cluster.pairs import PairRouter
from sglang_hybrid.cluster.peers import Peers
from sglang_hybrid.cluster.router import Router
from sglang_hybrid.cluster.worker import checked
from sglang_hybrid.cluster.workers import Workers
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import allow_files
from sglang_hybrid.routing.policies import POLICIES

logger = logging.getLogger(__name__)

DEFAULT = "restart_points"
DRAIN_S = 60.0
"""For requests that run, once the router is asked to end."""

ARRIVE_S = 2.0
"""The same for requests that are still being sent."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a router, whoever starts it."""
    parser.add_argument("--host", default="127.0.0.1", help="where the router listens (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="(default: 30000)")
    parser.add_argument("--routing", default=DEFAULT, choices=POLICIES, help=f"(default: {DEFAULT})")
    parser.add_argument("--api-key", help="of the workers; needed for the router's own pages too")
    parser.add_argument("--max-body-mb", type=float, default=64.0, help="largest body (default: 64)")


def main(argv: list[str]) -> int:
    """Route until stopped; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid route",
        description="A router before SGLang servers: each request goes to the worker that can resume it furthest, "
        "unless work waits there.",
        epilog="examples:\n  sglang-hybrid route --worker http://10.0.0.1:30000 --worker http://10.0.0.2:30000\n"
        "  sglang-hybrid route --prefill http://10.0.0.1:30000 --decode http://10.0.0.2:30000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--worker", action="append", default=[], metavar="URL", help="a server; once for each")
    parser.add_argument(
        "--prefill", action="append", default=[], metavar="URL[,PORT]",
        help="a server that computes prompts, and its bootstrap port if it is not the one that it names (docs/pd.md)",
    )  # fmt: skip
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a server that computes answers")
    add_flags(parser)
    options = parser.parse_args(argv)
    peers = None
    if options.prefill or options.decode:
        if options.worker:
            raise ConfigError(
                f"a router has whole servers or pairs; start another one for --worker {options.worker[0]}"
            )
        peers = Peers.named(options.prefill, options.decode)
    urls = checked(options.worker) if peers is None else peers.urls
    require(options)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stderr)
    return run(serve(options, urls, peers=peers))


def run(serving: Coroutine[None, None, int]) -> int:
    """Its exit status; 1 if a second signal cut it short."""
    try:
        return asyncio.run(serving)
    except asyncio.CancelledError:
        return 1


def require(options: argparse.Namespace) -> None:
    """Raise ConfigError for flags out of range."""
    if not 0 < options.port < 65536:
        raise ConfigError(f"--port is from 1 to 65535: {options.port}")
    if not options.max_body_mb > 0:
        raise ConfigError(f"--max-body-mb is positive: {options.max_body_mb}")


def http_session() -> aiohttp.ClientSession:
    """What a router asks workers over: nothing of one client's requests goes into those of another."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),  # less than uvicorn's five seconds
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def runner_of(router: Router, max_body_mb: float) -> web.AppRunner:
    """Serves `router`. Bodies stay as they came: a worker is told of their encoding, and reads none."""
    return web.AppRunner(
        router.application(max_body_mb),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=DRAIN_S,
        auto_decompress=False,
        logger=http_logger,
    )


async def drained(runner: web.AppRunner, router: Router) -> None:
    """Take no request more, and let those end that run."""
    hangs_up = asyncio.create_task(router.hang_up(ARRIVE_S))
    try:
        await runner.cleanup()
    finally:
        hangs_up.cancel()


async def serve(
    options: argparse.Namespace,
    urls: list[str],
    beside: Callable[[], Awaitable[None]] | None = None,
    peers: Peers | None = None,
) -> int:
    """Run a router until SIGTERM or SIGINT, and let requests end that run; `beside` runs with it.

    With `peers` it is a router of pairs. A second signal ends it at once, by CancelledError.
    """
    allow_files()  # two for each request
    stopping, serving, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set() and serving is not None:
            serving.cancel()
        logger.info("stopping; requests that run have %.0f s, a second signal ends them", DRAIN_S)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with http_session() as session:
        workers = Workers(urls, session, options.api_key, peers.meet if peers is not None else None)
        router = (
            Router(workers, session, options.routing, options.api_key)
            if peers is None
            else PairRouter(workers, session, options.routing, peers, options.api_key)
        )
        runner = runner_of(router, options.max_body_mb)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, options.host, options.port).start()
            except OSError as error:
                raise ConfigError(f"the router cannot listen; choose another --port: {error}") from error
            await workers.start()
            print(  # noqa: T201
                f"router: http://{options.host}:{options.port}, {options.routing}, "
                f"{len(workers.healthy)} of {len(urls)} workers; its pages: /workers, /metrics, /health",
                flush=True,
            )
            others = [asyncio.create_task(_run(beside))] if beside is not None else []
            await stopping.wait()
            for task in others:
                task.cancel()
        finally:
            try:
                await drained(runner, router)
            finally:  # a second signal ends up here, and a look over a closed session is a traceback
                await workers.stop()
    return 0


async def _run(beside: Callable[[], Awaitable[None]]) -> None:
    await beside()
