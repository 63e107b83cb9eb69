"""`sglang-hybrid cluster`: servers on this machine, or pairs of them, and a router before them, one command."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

from sglang_hybrid.cluster import route
from sglang_hybrid.cluster.peers import DECODE, PREFILL, Peers
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

logger = logging.getLogger(__name__)

PAGE_TOKENS = 64
"""Of the servers, where no flag says otherwise: a page is what an event names."""

GIVE_UP = 3
"""Starts in a row that came to nothing, after which a server stays down."""

_RESERVED = (
    "--port", "--host", "--kv-events-config", "--hybrid-state-events", "--model-path", "--model", "--api-key",
    "--disaggregation-mode", "--disaggregation-bootstrap-port",
)  # fmt: skip
_BACKEND = "--disaggregation-transfer-backend"


def main(argv: list[str]) -> int:
    """Serve until stopped; exit status 2 for bad input, 1 if no server starts."""
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid cluster",
        description="Servers on this machine, each with a cache of its own, and a router before them. "
        "A server that dies is started again. What follows -- goes to every server.",
        epilog="examples:\n  sglang-hybrid cluster --servers 2                  # the embedded model\n"
        "  sglang-hybrid cluster --servers 4 --model-path Qwen/Qwen3-Next-80B-A3B-Instruct -- --tp 2\n"
        "  sglang-hybrid cluster --prefill 2 --decode 1       # prompts here, answers there (docs/pd.md)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--servers", type=int, help="how many (default: 2)")
    parser.add_argument("--prefill", type=int, help="in place of --servers: how many compute prompts")
    parser.add_argument("--decode", type=int, help="and how many compute answers")
    parser.add_argument("--model-path", help="what they serve (default: the embedded model, built in models/)")
    parser.add_argument("--logs", type=Path, default=Path("cluster-logs"), help="folder of their logs")
    route.add_flags(parser)
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parser.parse_args(own)
    route.require(options)
    roles = _roles(options)
    for flag in flags:
        if flag.partition("=")[0] in _RESERVED:
            raise ConfigError(f"the cluster gives this flag to its servers itself; put it before -- or drop it: {flag}")
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stderr)
    folder = options.model_path or str(model.build(Path("models") / "demo-gdn"))
    try:
        options.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"logs cannot be written here, give another --logs: {error}") from error
    if any(roles):
        flags = _of_pairs(flags)
    shares = _gpus(len(roles), flags)
    servers = [
        _Kept(f"{role or 'server'}-{roles[:at].count(role)}", folder, flags, shares[at], options, role)
        for at, role in enumerate(roles)
    ]
    if _shares_segments(flags) and len(servers) > 1:
        peers = ",".join(server.url for server in servers)
        for server in servers:
            server.flags += ["--hybrid-segment-peers", peers]
    return route.run(_run(options, servers))


def _roles(options: argparse.Namespace) -> list[str]:
    """What every server does: prefill or decode, or "" for both."""
    if options.prefill is None and options.decode is None:
        counts = {"servers": 2 if options.servers is None else options.servers}
    elif options.servers is not None:
        raise ConfigError(
            f"a cluster has whole servers or pairs, so leave out --servers or --prefill: {options.servers}"
        )
    else:
        counts = {PREFILL: options.prefill or 0, DECODE: options.decode or 0}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name} is one or more: {count}")
    return [("" if name == "servers" else name) for name, count in counts.items() for _ in range(count)]


def _named(name: str, flags: list[str]) -> bool:
    return any(flag.partition("=")[0] == name for flag in flags)


def _shares_segments(flags: list[str]) -> bool:
    """Whether the servers keep segments, and nobody says who computes them for whom."""
    if _named("--hybrid-segment-peers", flags):
        return False
    return "--hybrid-segments=on" in flags or ("--hybrid-segments", "on") in pairwise(flags)


def _of_pairs(flags: list[str]) -> list[str]:
    """The flags of servers of pairs; raises ConfigError where nothing can hand over what they compute."""
    from sglang_hybrid.engine.launch import disaggregation
    from sglang_hybrid.engine.launch.platform import wants_cpu

    chosen = disaggregation.backend(wants_cpu(flags))
    for at, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name == _BACKEND:
            disaggregation.require(value or (flags[at + 1] if at + 1 < len(flags) else chosen))
            return flags
    disaggregation.require(chosen)
    return [*flags, _BACKEND, chosen]


def _gpus(servers: int, flags: list[str]) -> list[dict[str, str]]:
    """The environment of every server: its GPUs, or nothing on a CPU. Raises ConfigError if there are too few."""
    from sglang_hybrid.engine.launch import early
    from sglang_hybrid.engine.launch.flags import replicas
    from sglang_hybrid.engine.launch.platform import cuda_devices, wants_cpu

    if wants_cpu(flags):
        return [{} for _ in range(servers)]
    seen = early.read(flags)
    each = seen.tp_size * seen.pp_size * replicas(seen.dp_size, seen.enable_dp_attention)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = named.split(",") if named else [str(at) for at in range(cuda_devices())]
    if len(there) < servers * each:
        raise ConfigError(f"{servers} servers of {each} GPUs each need {servers * each}; there are: {len(there)}")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(there[at * each : (at + 1) * each])} for at in range(servers)]


class _Kept:
    """A server that is started again when it dies, on the same ports."""

    def __init__(
        self,
        name: str,
        folder: str,
        flags: list[str],
        environment: dict[str, str],
        options: argparse.Namespace,
        role: str = "",
    ) -> None:
        self.name, self._folder, self._environment, self.role = name, folder, environment, role
        self.port, bootstrap = free_port(), free_port()
        # A publisher binds wildcards only. It connects to another address: here, to one that the router listens on.
        channel = {
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
            "topic": "kv",
        }
        paged = [] if _named("--page-size", flags) else ["--page-size", str(PAGE_TOKENS)]
        told = ["--hybrid-state-events", "published", "--kv-events-config", json.dumps(channel)]
        if role:
            paged += ["--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(bootstrap)]
        told = [] if role == DECODE else told  # where no prompt is computed, none is resumed
        key = ["--api-key", options.api_key] if options.api_key else []
        self.flags = ["--host", "127.0.0.1", *paged, *told, *key, *flags]
        self.log = options.logs / f"{name}.log"
        self._server: Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    async def keep(self) -> None:
        """Start the server, and again whenever it dies; returns once it came to nothing `GIVE_UP` times in a row."""
        vain, loop = 0, asyncio.get_running_loop()
        while vain < GIVE_UP:
            began = loop.time()
            try:
                self._server = server = self._start()
            except OSError as error:  # no process more, for one
                vain += 1
                logger.error("%s cannot be started: %s", self.name, error)
                await asyncio.sleep(min(30.0, 2.0**vain))
                continue
            ready = await self._ready(server)
            if ready:
                vain = 0
                logger.info(
                    "%s is ready after %.0f s: %s, log in %s", self.name, loop.time() - began, self.url, self.log
                )
                while server.process.poll() is None:
                    await asyncio.sleep(0.5)
            server.stop()  # what is left of its children
            vain += not ready
            logger.error("%s ended with status %s:\n%s", self.name, server.process.returncode, server.log_tail(8))
            with suppress(OSError):  # the log may be gone too
                self.log.rename(self.log.with_suffix(".log.before"))
            await asyncio.sleep(min(30.0, 2.0**vain))
        logger.error("%s stays down after %d starts that came to nothing", self.name, vain)

    def _start(self) -> Server:
        start = partial(Server, self._folder, self.flags, port=self.port, environment=self._environment)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it with its logs
            return start(log=self.log)
        except OSError as error:  # a full disk is no reason to serve nobody
            logger.error("%s starts without a log: %s", self.name, error)
            return start(log=Path(os.devnull))

    async def _ready(self, server: Server) -> bool:
        while server.process.poll() is None:
            if await asyncio.to_thread(server.answers):
                return True
            await asyncio.sleep(0.5)
        return False


async def _run(options: argparse.Namespace, servers: list[_Kept]) -> int:
    up = True

    async def keep() -> None:
        nonlocal up
        roles = {server.role for server in servers}
        kinds = [asyncio.gather(*(server.keep() for server in servers if server.role == role)) for role in roles]
        try:
            await asyncio.wait(kinds, return_when=asyncio.FIRST_COMPLETED)  # half a pair serves nobody
        finally:
            for kind in kinds:  # or they would start again what is stopped
                kind.cancel()
            for ended in await asyncio.gather(*kinds, return_exceptions=True):
                if isinstance(ended, Exception):
                    logger.error("the cluster stops on an error of its own", exc_info=ended)
        up = False
        os.kill(os.getpid(), 15)  # none is left

    urls = {role: [server.url for server in servers if server.role == role] for role in ("", PREFILL, DECODE)}
    peers = Peers.named(urls[PREFILL], urls[DECODE]) if urls[PREFILL] else None
    try:
        await route.serve(options, [server.url for server in servers], keep, peers)
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
    return 0 if up else 1
