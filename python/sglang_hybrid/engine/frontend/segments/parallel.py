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
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp

from sglang_hybrid.engine.frontend.segments import warming
from sglang_hybrid.engine.frontend.segments.aborts import unless_aborted
from sglang_hybrid.engine.frontend.segments.local import Local, Tenant, name
from sglang_hybrid.engine.frontend.segments.peers import NotKept, Offer, Peer
from sglang_hybrid.engine.frontend.segments.plans import PATIENCE_S, Plan, Segments, Share, planned, worth
from sglang_hybrid.engine.frontend.segments.questions import ask
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.segments import marked
from sglang_hybrid.segment.geometry import LEAST_TOKENS, Range

logger = logging.getLogger(__name__)

_AT_ONCE = 2
"""Segments that one server computes for a prompt at a time: while one is sent, the next is computed."""
outer: ContextVar[Any] = ContextVar("outer", default=None)
"""The request of a client as it came: one prompt or a list of them."""


@dataclass(frozen=True, slots=True)
class Making:
    """A `share` that is being made; the task ends with it, or when nobody should wait for it any longer."""

    share: Share
    task: asyncio.Task[None]


class Parallel:
    """Of one HTTP process; `peers` are all servers that compute for each other, this one maybe among them."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers, self.local = peers, Local()
        self._making: dict[str, Making] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._who: dict[str, Any] | None = None
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    def forget(self) -> None:
        """The cache was emptied, or the weights change."""
        self.local.forget()
        self._who = None

    async def prepare(self, manager: Any, ids: list[int], ranges: Sequence[Range], tenant: Tenant) -> None:
        """Have the cold segments of a prompt computed, if that is sooner than by its own prefill."""
        names = [name(ids[low:high], tenant) for low, high in ranges]
        fresh = {
            each: ids[low:high]
            for each, (low, high) in zip(names, ranges, strict=True)
            if high - low >= LEAST_TOKENS and not self.local.has(each)
        }
        if worth(fresh) and not all(peer.is_out for peer in self.peers):
            question = {"cold": [list(each) for each in ranges], "ids": ids, **tenant}
            await self._have(manager, fresh, question, names, tenant)
        for each in names:
            self.local.sight(each)

    async def _have(
        self, manager: Any, fresh: Segments, question: dict[str, Any], names: list[str], tenant: Tenant
    ) -> None:
        """Wait for the segments `fresh`: those that are being made, and the cold ones that it pays to share out."""
        alone = {each: some for each, some in fresh.items() if each not in self._making}
        try:
            found = await self._plan(manager, alone, question, names) if worth(alone) else None
        except TimeoutError:
            logger.info("the scheduler is busy: nothing of a prompt is shared out")
            found = None
        wanted = {self._making[each].task for each in fresh if each in self._making}  # some began in between
        if found is not None:
            who, plan = found
            for share in plan.shares:
                share = share.without(self._making)
                if share.segments:
                    wanted.add(self._begin(manager, who, share, tenant, plan.patience))
        if wanted:
            await asyncio.wait(wanted)

    async def _plan(
        self, manager: Any, fresh: Segments, question: dict[str, Any], names: list[str]
    ) -> tuple[dict[str, Any], Plan] | None:
        """Who this server is and who computes what, None if this server alone is as quick.

        The scheduler answers one question a round, so it is asked which segments are cold once others could help.
        """
        who = await self._known(manager)
        offers = await self._offers(who, [*fresh])

        def plan(cold: Segments) -> Plan | None:
            return planned(cold, offers, [*fresh], self.local.pace.value, self.local.waiting(manager))

        if not offers or (first := plan(fresh)) is None:
            return None
        who = await asyncio.wait_for(ask(manager, question), first.patience)
        cold = {names[at] for at in who["cold"]} & fresh.keys()
        left = {each: some for each, some in fresh.items() if each in cold}
        last = plan(left) if worth(left) else None
        return None if last is None else (who, last)

    async def _known(self, manager: Any) -> dict[str, Any]:
        """Who this server is; TimeoutError if its scheduler does not say."""
        if self._who is not None:
            return self._who
        if self._asking is None:
            self._asking = asyncio.create_task(self._meet(manager))
        return await asyncio.wait_for(asyncio.shield(self._asking), PATIENCE_S)

    async def _meet(self, manager: Any) -> dict[str, Any]:
        try:
            self._who = await ask(manager, {"who": None})
            return self._who
        finally:
            self._asking = None

    async def _offers(self, who: dict[str, Any], names: list[str]) -> list[tuple[Peer, Offer]]:
        """What others can do about segments by name."""
        asked = [peer for peer in self.peers if not peer.is_out]
        async with aiohttp.ClientSession() as session:
            probes = (peer.probe(session, who["server"], who["form"], names) for peer in asked)
            answers = await asyncio.gather(*probes)
        if any(peer.is_out and not peer.is_self for peer in asked):
            self._who = None  # it may be this server that changed, and another of its HTTP processes knows
        return [(peer, offer) for peer, offer in zip(asked, answers, strict=True) if offer is not None]

    def _begin(
        self, manager: Any, who: dict[str, Any], share: Share, tenant: Tenant, patience: float
    ) -> asyncio.Task[None]:
        """Have a share made; what is returned ends after `patience` seconds at the latest, for all who wait for it."""
        began = time.monotonic()
        work = asyncio.create_task(self._share(manager, who, share, tenant))
        task = asyncio.create_task(self._within(work, share, patience, began))
        for each in work, task:
            self._tasks.add(each)
            each.add_done_callback(self._tasks.discard)
        for name_ in share.segments:
            self._making[name_] = Making(share, task)
        return task

    async def _within(self, work: asyncio.Task[None], share: Share, patience: float, began: float) -> None:
        try:
            _, late = await asyncio.wait({work}, timeout=patience)
            if late and share.peer is not None:
                share.peer.fail(TimeoutError(f"nothing came within {patience:.1f} s"), began)
        finally:
            for each in share.segments:
                self._made(share, each)

    def _made(self, share: Share, each: str) -> None:
        making = self._making.get(each)
        if making is not None and making.share is share:
            del self._making[each]

    async def _share(self, manager: Any, who: dict[str, Any], share: Share, tenant: Tenant) -> None:
        """Have one server compute its share, and everything of it here; says what is in the way, and raises nothing."""
        began, peer, total = time.monotonic(), share.peer, sum(map(len, share.segments.values()))
        if peer is not None:
            there = await self._fetch(manager, who, peer, share, tenant)
        else:
            segments = sorted(share.segments.values(), key=len, reverse=True)
            try:
                await warming.warm(manager, {"segments": segments, **tenant}, ahead=True)
                there = True
            except Exception as error:
                logger.warning("segments are not computed ahead: %s", error)
                there = False
        if there and share.idle:
            (self.local if peer is None else peer).pace.add((time.monotonic() - began) / total)

    async def _fetch(self, manager: Any, who: dict[str, Any], peer: Peer, share: Share, tenant: Tenant) -> bool:
        """Have `peer` compute and send its share; whether all of it is kept here."""
        limit = asyncio.Semaphore(_AT_ONCE)
        async with aiohttp.ClientSession() as session:

            async def fetch(each: str) -> bool:
                async with limit:
                    began = time.monotonic()
                    try:
                        parcel = await peer.send(session, who, share.segments[each], tenant)
                    except Exception as error:
                        peer.fail(error, began)
                        return False
                try:
                    await parcel.keep(manager)  # which waits for what this server computes itself
                except NotKept as error:
                    logger.info("a segment that %s computed is not kept: %s", peer.url, error)
                    return False
                except Exception as error:  # of this server's own scheduler
                    logger.warning("a segment that %s computed cannot be kept: %s", peer.url, error)
                    return False
                self._made(share, each)
                return True

            longest = sorted(share.segments, key=lambda each: -len(share.segments[each]))
            return all(await asyncio.gather(*map(fetch, longest)))

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
        _parallel.forget()


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
