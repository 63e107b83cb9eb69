"""Segment parallelism: the cold segments of a prompt are computed at several servers at once (HYPIC, section 4.4).

    prompt     [ segment 1, cold ][ segment 2, kept ][ segment 3, cold ][ segment 4, cold ][ question ]
    here       compute 1 ........................ wait .. compose the prompt as if all had been kept
    server B   compute 3, send 3 ...
    server C   compute 4, send 4 ...

This is done in the HTTP process, once a prompt is tokens, and before the scheduler gets it. Whatever goes wrong, the
request goes on, and its own prefill computes what is not there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp

from sglang_hybrid.engine.frontend.segments import warming
from sglang_hybrid.engine.frontend.segments.aborts import unless_aborted
from sglang_hybrid.engine.frontend.segments.local import Local, Tenant, name
from sglang_hybrid.engine.frontend.segments.peers import NotKept, Peer
from sglang_hybrid.engine.frontend.segments.questions import ask
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.segments import marked
from sglang_hybrid.segment.dispatch import shared_out
from sglang_hybrid.segment.geometry import LEAST_TOKENS, Range

logger = logging.getLogger(__name__)

WORTH_TOKENS = 512
"""Fewer cold tokens are computed sooner than others are asked."""
_AT_ONCE = 2
"""Segments that one server computes for a prompt at a time: while one is sent, the next is computed."""
_PATIENCE_S, _LEAST_PATIENCE_S = 30.0, 1.0
_PATIENCE = 4
"""Times what was expected."""

outer: ContextVar[Any] = ContextVar("outer", default=None)
"""The request of a client as it came: one prompt or a list of them."""


@dataclass(frozen=True, slots=True)
class Share:
    """The `segments` by name that `peer` computes, None for this server; it was `idle`, so that its pace is seen."""

    peer: Peer | None
    segments: dict[str, list[int]]
    idle: bool

    def without(self, names: Container[str]) -> Share:
        return replace(self, segments={each: some for each, some in self.segments.items() if each not in names})


@dataclass(frozen=True, slots=True)
class Plan:
    """What each server does, and in how many seconds all is there, 0 where nobody can tell."""

    shares: list[Share]
    seconds: float


class Parallel:
    """Of one HTTP process; `peers` are all servers that compute for each other, this one maybe among them."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers, self.local = peers, Local()
        self._making: dict[str, asyncio.Task[None]] = {}

    async def prepare(self, manager: Any, ids: list[int], ranges: Sequence[Range], tenant: Tenant) -> None:
        """Have the cold segments of a prompt computed, if that is sooner than by its own prefill."""
        names = [name(ids[low:high], tenant) for low, high in ranges]
        lengths = [high - low for low, high in ranges]
        fresh = [size for size, each in zip(lengths, names, strict=True) if not self.local.has(each)]
        if sum(size for size in fresh if size >= LEAST_TOKENS) >= WORTH_TOKENS and not all(
            peer.is_out for peer in self.peers
        ):
            who = await ask(manager, {"cold": [list(each) for each in ranges], "ids": ids, **tenant})
            await self._have(
                manager, who, {names[at]: ids[ranges[at][0] : ranges[at][1]] for at in who["cold"]}, tenant
            )
        for each in names:
            self.local.sight(each)

    async def _have(self, manager: Any, who: dict[str, Any], cold: dict[str, list[int]], tenant: Tenant) -> None:
        """Wait for the segments `cold`, by name: those that are being made, and those that it pays to share out."""
        alone = {each: some for each, some in cold.items() if each not in self._making}
        plan = await self._plan(manager, who, alone) if sum(map(len, alone.values())) >= WORTH_TOKENS else None
        wanted = {self._making[each] for each in cold if each in self._making}  # of which some began in between
        ours: dict[asyncio.Task[None], Share] = {}
        patience = _PATIENCE_S
        if plan is not None:
            patience = max(_LEAST_PATIENCE_S, _PATIENCE * plan.seconds) if plan.seconds else _PATIENCE_S
            for share in plan.shares:
                share = share.without(self._making)
                if not share.segments:
                    continue
                task = asyncio.create_task(self._share(manager, who, share, tenant))
                wanted.add(task)
                ours[task] = share
                for each in share.segments:
                    self._making[each] = task
                task.add_done_callback(partial(self._made, share))
        if wanted:
            _, late = await asyncio.wait(wanted, timeout=patience)
            for task in late & ours.keys():
                if (peer := ours[task].peer) is not None:
                    peer.fail(TimeoutError(f"nothing came within {patience:.1f} s"))

    def _made(self, share: Share, _: asyncio.Task[None]) -> None:
        for each in share.segments:
            self._making.pop(each, None)

    async def _plan(self, manager: Any, who: dict[str, Any], cold: dict[str, list[int]]) -> Plan | None:
        """Who computes what; None if this server alone is as quick."""
        asked = [peer for peer in self.peers if not peer.is_out]
        waiting = self.local.waiting(manager)
        async with aiohttp.ClientSession() as session:
            probes = (peer.probe(session, who["server"], who["form"], [*cold]) for peer in asked)
            answers = await asyncio.gather(*probes)
        there = [(peer, offer) for peer, offer in zip(asked, answers, strict=True) if offer is not None]
        sizes = [len(some) for some in cold.values()]
        known = self.local.pace.value
        own = known or 1.0  # before anything was measured tokens are counted, as the paper does
        costs, waits, idle = [[own * size for size in sizes]], [own * waiting], [not waiting]
        for peer, offer in there:
            its = (peer.pace.value or offer.pace or own) if known else 1.0
            way = (peer.transfer.value or 0.0) if known else 0.0
            costs.append([size * (way if held else its) for size, held in zip(sizes, offer.held, strict=True)])
            waits.append(its * offer.waiting + ((peer.way.value or 0.0) if known else 0.0))
            idle.append(not offer.waiting and not any(offer.held))
        found = shared_out(costs, waits)
        if found is None:
            return None
        assigned, seconds = found
        peers = [None, *(peer for peer, _ in there)]
        shares = [
            Share(
                peer,
                {each: some for (each, some), who in zip(cold.items(), assigned, strict=True) if who == at},
                idle[at],
            )
            for at, peer in enumerate(peers)
            if at in assigned
        ]
        return Plan(shares, seconds if known else 0.0)

    async def _share(self, manager: Any, who: dict[str, Any], share: Share, tenant: Tenant) -> None:
        """Have one server compute its share, and everything of it here; says what is in the way, and raises nothing."""
        began, segments = time.monotonic(), sorted(share.segments.values(), key=len, reverse=True)
        peer = share.peer
        try:
            if peer is None:
                await warming.warm(manager, {"segments": segments, **tenant}, ahead=True)
            else:
                await self._fetch(manager, who, peer, segments, tenant)
        except NotKept as error:
            logger.info("a segment that %s computed is not kept: %s", peer and peer.url, error)
        except Exception as error:
            if peer is None:
                logger.warning("segments are not computed ahead: %s", error)
            else:
                peer.fail(error)
        else:
            if share.idle:
                (self.local if peer is None else peer).pace.add((time.monotonic() - began) / sum(map(len, segments)))

    @staticmethod
    async def _fetch(manager: Any, who: dict[str, Any], peer: Peer, segments: list[list[int]], tenant: Tenant) -> None:
        """Have `peer` compute and send `segments`; raises what kept it from one once all have come to an end."""
        limit = asyncio.Semaphore(_AT_ONCE)
        async with aiohttp.ClientSession() as session:

            async def fetch(some: list[int]) -> None:
                async with limit:
                    parcel = await peer.send(session, who, some, tenant)
                await parcel.keep(manager)  # which waits for what this server computes itself

            results = await asyncio.gather(*map(fetch, segments), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    def told(self) -> list[dict[str, Any]]:
        """What an administrator is told of the others."""
        return [
            {"url": peer.url, "fetched": peer.fetched, "is_self": peer.is_self, "why_not": peer.why or None}
            for peer in self.peers
        ]


_parallel: Parallel | None = None


def of_this_process(manager: Any) -> Parallel | None:
    """None where no server was named to compute segments for this one."""
    global _parallel
    if _parallel is None and settings().segment_peers:
        args = manager.server_args
        key = args.admin_api_key or args.api_key
        _parallel = Parallel([Peer(url, key) for url in settings().peers])
    return _parallel


def forget() -> None:
    """The cache was emptied, or the weights change."""
    if _parallel is not None:
        _parallel.local.forget()


async def prepared(manager: Any, made: Any) -> Any:
    """`made`, which goes to the scheduler next, once other servers have computed their part of its segments."""
    parallel = of_this_process(manager)
    ids = getattr(made, "input_ids", None)
    if parallel is None or not ids:
        return made
    params = getattr(getattr(made, "sampling_params", None), "custom_params", None)
    if not warming.here.get() and _can(made) and marked.marks(params):
        whole = outer.get()
        if whole is not None and whole.is_single:  # prompts of a list come one after the other, and would wait here
            tenant = {key: value for key in ("extra_key", "cache_salt") if (value := getattr(made, key, None))}
            try:
                work = parallel.prepare(manager, list(ids), marked.named(params, len(ids)), tenant)
                await unless_aborted(manager, made.rid, work)
            except Exception:
                logger.exception("segments of request %s are computed here alone", made.rid)
    parallel.local.begin(manager, made.rid, len(ids))
    return made


def _can(made: Any) -> bool:
    """Whether a request may reuse segments (`segments.composer.unable`)."""
    start = getattr(made, "logprob_start_len", -1)
    return not (
        (getattr(made, "return_logprob", False) and 0 <= start < len(made.input_ids) - 1)
        or getattr(made, "return_hidden_states", False)
        or getattr(made, "input_embeds", None) is not None
        or getattr(made, "mm_inputs", None) is not None
        or getattr(made, "session_params", None) is not None
    )
