"""Other servers that compute segments for this one: what is asked of them, and what comes back."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from sglang_hybrid.engine.frontend.segments.files import Files
from sglang_hybrid.engine.frontend.segments.local import Mean, Tenant
from sglang_hybrid.engine.frontend.segments.questions import PATH, ask

logger = logging.getLogger(__name__)

PROBE, PARCEL = PATH + "/probe", PATH + "/parcel"
PROBE_S = 0.5
"""For a server to say what it has: it asks nobody for it."""
PARCEL_S = 60.0
_MOST_HEAD = 4096
_FIRST_S, _LONGEST_S = 5.0, 120.0


class Refused(Exception):
    """A server has reasons not to send a segment."""


class NotKept(Exception):
    """This server has no room for what came."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Which segments a server has, tokens that wait there, and its seconds for a token if it knows them."""

    held: list[bool]
    waiting: float
    pace: float | None

    @classmethod
    def read(cls, said: dict[str, Any], segments: int) -> Offer:
        """From what it said; raises ValueError, KeyError or TypeError."""
        pace = said["pace"] if said["pace"] is None else float(said["pace"])
        offer = cls([bool(each) for each in said["held"]], float(said["waiting"]), pace)
        if len(offer.held) != segments or not offer.waiting >= 0 or not (pace is None or 0 < pace < math.inf):
            raise ValueError(f"an offer is of {segments} segments, its figures are positive: {offer}")
        return offer


class Peer:
    """One other server, by its `url`; `key` opens it. It is asked again some time after it failed."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.pace, self.transfer, self.way = Mean(), Mean(), Mean()
        """Seconds from asking for a token's share of segments to having it, if they are computed for it and if they are
        there; and seconds that a question takes."""
        self.is_self = False
        self.why = ""
        self._until, self._judged, self._pause = 0.0, 0.0, _FIRST_S
        self.fetched = 0

    @property
    def is_out(self) -> bool:
        return time.monotonic() < self._until

    def fail(self, error: Exception, began: float) -> None:
        """Leave it alone for a while, the longer the more often that comes to nothing.

        What `began` before it last worked or failed says nothing new, nor does what fails beside others.
        """
        now = time.monotonic()
        if self.is_out or began < self._judged:
            return
        why = f"{type(error).__name__}: {error}" if not isinstance(error, Refused) else str(error)
        if why != self.why:
            logger.warning("%s computes no segments for this server: %s", self.url, why[:300])
        self.why, self._until, self._judged = why, now + self._pause, now
        self._pause = min(2 * self._pause, _LONGEST_S)

    def worked(self) -> None:
        """It has sent a segment."""
        self.fetched += 1
        if self.why:
            logger.warning("%s computes segments for this server again", self.url)
        self.why, self._pause, self._judged = "", _FIRST_S, time.monotonic()

    def be_self(self) -> None:
        """It is this server. Another may have the address later, so it is asked again."""
        self.is_self, self._until = True, time.monotonic() + _LONGEST_S

    async def probe(self, session: aiohttp.ClientSession, server: str, form: str, names: list[str]) -> Offer | None:
        """What it can do for `server`, this one, about segments by name; None if it is no help."""
        began = time.monotonic()
        body = {"server": server, "form": form, "names": names}
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_S)
            async with session.post(self.url + PROBE, json=body, headers=self._headers, timeout=timeout) as response:
                said = await _json(response)
            if said["server"] == server:
                self.be_self()
                return None
            self.is_self = False
            if said["form"] != form:
                raise Refused(f"model, weights, release or settings of segments differ: {said['form']} is not {form}")
            offer = Offer.read(said, len(names))
        except Exception as error:  # whatever it says
            self.fail(error, began)
            return None
        self.way.add(time.monotonic() - began)
        return offer

    async def send(self, session: aiohttp.ClientSession, who: dict[str, Any], ids: list[int], tenant: Tenant) -> Parcel:
        """Have it send the entry of the segment `ids`; raises what kept it from it."""
        began = time.monotonic()
        body = {"form": who["form"], "segment": ids, **tenant}
        timeout = aiohttp.ClientTimeout(total=PARCEL_S)
        async with session.post(self.url + PARCEL, json=body, headers=self._headers, timeout=timeout) as response:
            if response.status != 200:
                await _json(response)
            length = int.from_bytes(await response.content.readexactly(4), "little")
            if not 0 < length <= _MOST_HEAD:
                raise Refused(f"it sends no parcel: {length}")
            head = json.loads(await response.content.readexactly(length))
            about = {"tokens": int(head["tokens"]), "kept": int(head["kept"]), "made": bool(head["made"])}
            size, most = int(head["bytes"]), who["sizes"][0] + who["sizes"][1] * len(ids)
            if not 0 < size <= most:
                raise Refused(f"it sends a parcel of {size} bytes, which has {most} at most")
            files = Files(who["ranks"])
            try:
                await files.fill(size, response.content)
            except BaseException:
                files.close()
                raise
        if not about["made"]:
            self.transfer.add((time.monotonic() - began) / len(ids))
        self.worked()
        return Parcel({"unpack": ids, "form": who["form"], "from": files.told, **tenant, **about}, files)


@dataclass(frozen=True, slots=True)
class Parcel:
    """An entry in `files`, and the `question` to this server's scheduler that makes it one of its own."""

    question: dict[str, Any]
    files: Files

    async def keep(self, manager: Any) -> None:
        """Raises NotKept where this server has no room for it, ConfigError where its scheduler is at fault."""
        try:
            said = await ask(manager, self.question, self.files)
        except Exception:
            self.files.close()
            raise
        self.files.close()  # who is cancelled leaves that to the question, which the scheduler may not have read
        if "why" in said:
            raise NotKept(said["why"])


async def _json(response: aiohttp.ClientResponse) -> Any:
    """Its JSON, or the error that it tells of."""
    if response.status == 200:
        return await response.json()
    text = (await response.text())[:300]
    raise Refused(f"{response.status} {text}")
