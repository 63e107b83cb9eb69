"""What a server does for others: it says which segments it has and how busy it is, and computes and sends some."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.segments.files import Files
from sglang_hybrid.engine.frontend.segments.local import Local, Tenant, name
from sglang_hybrid.engine.frontend.segments.questions import ask
from sglang_hybrid.engine.frontend.segments.warming import read, warm
from sglang_hybrid.engine.frontend.validation.limits import shown

MOST_NAMES = 256
_FIELDS = frozenset({"form", "segment", "cache_salt", "extra_key"})


class Handing:
    """Of the server whose HTTP process knows `local`."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._who: dict[str, Any] | None = None

    async def probed(self, manager: Any, body: Any) -> dict[str, Any]:
        """The answer to another server's question: who this is, what it has, what waits here, and its pace."""
        names = body.get("names") if isinstance(body, dict) else None
        if not isinstance(names, list) or len(names) > MOST_NAMES or any(not isinstance(each, str) for each in names):
            raise ConfigError(f"names are those of at most {MOST_NAMES} segments: {shown(body)}")
        local, who = self._local, await self._known(manager, body.get("form"))
        return {
            "server": who["server"],
            "form": who["form"],
            "held": [local.has(each) for each in names],
            "waiting": local.waiting(manager),
            "pace": local.pace.value,
        }

    async def parcel(self, manager: Any, body: Any, request: Any = None) -> AsyncIterator[bytes]:
        """The entry of a segment, computed if need be: a length of 4 bytes, so many of JSON, what each rank has.

        Nothing more is computed once the connection of the `request` is closed.
        """
        from fastapi import HTTPException

        form = body.get("form") if isinstance(body, dict) else None
        if not isinstance(form, str) or not _FIELDS.issuperset(body):
            raise ConfigError(f"the body has {', '.join(sorted(_FIELDS))}, the form of a server: {shown(body)}")
        tenant = {key: value for key, value in body.items() if key not in ("form", "segment")}
        (ids,), tenant = read(manager, {**tenant, "segments": [body.get("segment")]})
        who = await self._known(manager, form)
        if who["form"] != form:
            raise HTTPException(409, f"model, weights, release or settings of segments differ: {who['form']}")
        files = Files(who["ranks"])
        try:
            question = {"pack": ids, "form": form, "into": files.told, **tenant}
            told = await self._packed(manager, question, tenant, files, request)
        except Exception:
            files.close()
            raise
        return _sent(json.dumps(told).encode(), files, int(told["bytes"]))

    async def _packed(
        self, manager: Any, question: dict[str, Any], tenant: Tenant, files: Files, request: Any
    ) -> dict[str, Any]:
        """What is said of an entry once it is in `files`; raises HTTPException if it cannot be."""
        from fastapi import HTTPException

        began, made, ids = time.monotonic(), False, question["pack"]
        known = name(ids, tenant)
        said = await ask(manager, question, files) if self._local.has(known) else {"why": "nobody sent it yet"}
        if "why" in said:
            made = True
            (warmed,) = (await warm(manager, {"segments": [ids], **tenant}, request))["segments"]
            if not warmed["kept"]:
                raise HTTPException(503, f"this segment is not kept: {warmed['reason']}")
            said = await ask(manager, question, files)
        if "why" in said:
            raise HTTPException(503, f"this segment is not sent: {said['why']}")
        self._local.sight(known)
        return {**said, "made": made, "seconds": time.monotonic() - began}

    async def _known(self, manager: Any, form: Any) -> dict[str, Any]:
        """Who this is: asked for anew if it may have changed, as it does with the weights."""
        if self._who is None or form != self._who["form"]:
            self._who = await ask(manager, {"who": None})
        return self._who


async def _sent(head: bytes, files: Files, size: int) -> AsyncIterator[bytes]:
    try:
        yield len(head).to_bytes(4, "little") + head
        async for piece in files.pieces(size):
            yield piece
    finally:
        files.close()
