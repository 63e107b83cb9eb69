"""What one worker holds, kept up to date in an index from the worker's channel of events (docs/events.md).

A batch has a sequence number. After a gap, or a number that went back because the worker started anew, everything is
forgotten and a snapshot asked for; so it is at the start. Without a replay socket the index fills from what comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.routing.index import SNAPSHOT, RestartIndex

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Between two snapshots: a channel of garbage must not keep a worker busy with them."""

RETRY_S = 5.0
"""Between two tries to listen, where an address cannot be bound or has no such host."""

JOINED_S = 0.5
"""For a subscription to arrive: what is published before it has is not heard."""

_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")


class Channel(NamedTuple):
    """Where a worker tells of its cache, and where it is asked for a snapshot (None: nowhere).

    A worker listens where its endpoint is a wildcard, and connects to any other one: then the router `binds` it.
    """

    endpoint: str
    replay: str | None
    topic: str
    page_tokens: int
    binds: bool = False

    @classmethod
    def of(cls, info: dict[str, Any], url: str) -> Channel | None:
        """The channel that `/server_info` of the worker at `url` names; None if it names none.

        Raises ConfigError for several ranks, each with a cache of its own: a request cannot be sent to one of them.
        """
        told = info.get("kv_events")
        if not isinstance(told, dict) or not told.get("endpoint_port_base"):
            return None
        if int(told.get("dp_size") or 1) > 1:
            raise ConfigError(f"a worker that tells what it holds has one data-parallel rank: {told['dp_size']}")
        host = str(urlsplit(url).hostname)
        named = str(told.get("endpoint_host") or "*")
        binds = named not in _WILDCARDS
        at = named if binds else host
        replay = None
        try:
            config = json.loads(info.get("kv_events_config") or "{}")
            if config.get("replay_endpoint"):
                replay = f"tcp://{host}:{int(str(config['replay_endpoint']).rsplit(':', 1)[-1])}"
        except (ValueError, AttributeError):
            pass
        page = int(told.get("block_size") or 0)
        if page < 1:
            raise ConfigError(f"the worker's blocks have no size: {told.get('block_size')}")
        return cls(f"tcp://{at}:{int(told['endpoint_port_base'])}", replay, str(told.get("topic") or ""), page, binds)


class Follower:
    """Applies the events of one worker to `index`, until it is stopped."""

    def __init__(self, worker: str, channel: Channel, index: RestartIndex) -> None:
        self._worker, self._channel, self._index = worker, channel, index
        self._latest: int | None = None
        self._asked_s = -math.inf
        self._task: asyncio.Task[None] | None = None
        self.batches = self.events = self.unknown = self.gaps = self.snapshots = 0

    def shown(self) -> dict[str, int]:
        """Its counts."""
        return {name: getattr(self, name) for name in ("batches", "events", "unknown", "gaps", "snapshots")}

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except Exception as error:  # whatever it is, stale knowledge of a worker is worse than none
                known = isinstance(error, (zmq.ZMQError, OSError))
                logger.warning(
                    "events of worker %s are not heard, trying again: %s", self._worker, error, exc_info=not known
                )
            self._index.join(self._worker)
            self._latest = None
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        context = zmq.asyncio.Context.instance()
        listening, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        try:
            listening.setsockopt(zmq.RCVHWM, 0)
            if self._channel.binds:
                listening.bind(self._channel.endpoint)
            else:
                listening.connect(self._channel.endpoint)
            listening.setsockopt_string(zmq.SUBSCRIBE, self._channel.topic)
            if self._channel.replay is not None:
                asking.connect(self._channel.replay)
            await asyncio.sleep(JOINED_S)
            await self._snapshot(asking)
            while True:
                frames = await listening.recv_multipart()
                if not self.heard(frames):
                    self._index.join(self._worker)
                    await self._snapshot(asking)
                    self.heard(frames)
        finally:
            listening.close(linger=0)
            asking.close(linger=0)

    def heard(self, frames: list[bytes]) -> bool:
        """Apply one batch, unless others are missing before it: then the next call applies it whatever is missing."""
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.unknown += 1
            return True
        number, latest = int.from_bytes(frames[-2], "big"), self._latest
        if latest is not None and number == latest:
            return True  # doubled
        if latest is not None and number != latest + 1:
            self.gaps += 1
            self._latest = None
            return False
        self._latest = number
        self.batches += 1
        try:
            batch = msgspec.msgpack.decode(frames[-1])
            events = batch[1]
            for event in events:
                known = isinstance(event, dict) and self._index.apply(self._worker, event)
                self.events += known
                self.unknown += not known
        except (msgspec.DecodeError, TypeError, IndexError, KeyError, UnicodeDecodeError):
            self.unknown += 1
        return True

    async def _snapshot(self, asking: Any) -> None:
        if self._channel.replay is None:
            return
        await asyncio.sleep(
            max(0.0, self._asked_s + AGAIN_S - time.monotonic())
        )  # what comes meanwhile waits in the socket
        self._asked_s = time.monotonic()
        self.snapshots += 1
        await asking.send_multipart([b"", SNAPSHOT])
