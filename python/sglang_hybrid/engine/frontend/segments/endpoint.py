"""`/hybrid/segments`: compute segments before they are needed (POST), list them (GET), drop them (DELETE).

The routes are added by the first HTTP request that an application of SGLang's gets: its workers load this package when
the application is there already. Listing and dropping are the administrator's, as `/flush_cache` is.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.segments import parallel
from sglang_hybrid.engine.frontend.segments.handing import Handing
from sglang_hybrid.engine.frontend.segments.peers import PARCEL, PROBE
from sglang_hybrid.engine.frontend.segments.questions import PATH, ask
from sglang_hybrid.engine.frontend.segments.warming import warm
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.frontend.validation.limits import shown
from sglang_hybrid.engine.segments.listing import MOST_LISTED

_ADDED = "sglang_hybrid_segments"
_DIGITS = frozenset("0123456789abcdef")


def open_routes(app: Any, scope: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook of an application that is called: give SGLang's the routes, once."""
    state = app.state
    if scope["type"] != "http" or settings().segments != "on" or hasattr(state, _ADDED):
        return
    if not hasattr(state, "openai_serving_chat"):
        return
    from sglang.srt.utils.auth import AuthLevel, auth_level

    administrative = auth_level(AuthLevel.ADMIN_OPTIONAL)

    async def warm_up(request: Any) -> dict[str, Any]:
        return await warm(_manager(app), await _json(request), request)

    @administrative
    async def list_segments(request: Any) -> dict[str, Any]:
        limit = request.query_params.get("limit", "1000")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 5 and int(limit) <= MOST_LISTED):
            raise ConfigError(f"limit is a number of segments from 0 to {MOST_LISTED}: {shown(limit)}")
        said = await ask(_manager(app), {"list": int(limit)})
        others = parallel.of_this_process(_manager(app))
        told = {} if others is None else {"peers": others.told()}
        return {"segments": said.pop("entries"), **said, **told}

    @administrative
    async def drop_all() -> dict[str, Any]:
        parallel.forget()
        return await ask(_manager(app), {"drop": None})

    @administrative
    async def drop_one(key: str) -> dict[str, Any]:
        from fastapi import HTTPException

        if len(key) != 32 or not _DIGITS.issuperset(key):
            raise ConfigError(f"a key of a segment has 32 hexadecimal digits, as GET {PATH} lists it: {shown(key)}")
        said = await ask(_manager(app), {"drop": [key]})
        if not said["dropped"]:
            raise HTTPException(404, f"no segment has this key: {key}")
        return said

    _annotate(warm_up, list_segments)
    app.add_api_route(PATH, warm_up, methods=["POST"])
    app.add_api_route(PATH, list_segments, methods=["GET"])
    app.add_api_route(PATH, drop_all, methods=["DELETE"])
    if (others := parallel.of_this_process(_manager(app))) is not None:
        _open_to_peers(app, Handing(others.local))
    app.add_api_route(PATH + "/{key}", drop_one, methods=["DELETE"])
    setattr(state, _ADDED, True)


def _open_to_peers(app: Any, handing: Handing) -> None:
    """Routes by which other servers ask this one for segments."""
    from fastapi.responses import StreamingResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    administrative = auth_level(AuthLevel.ADMIN_OPTIONAL)

    @administrative
    async def probe(request: Any) -> dict[str, Any]:
        return await handing.probed(_manager(app), await _json(request))

    @administrative
    async def parcel(request: Any) -> Any:
        sent = await handing.parcel(_manager(app), await _json(request), request)
        return StreamingResponse(sent, media_type="application/octet-stream")

    _annotate(probe, parcel)
    app.add_api_route(PROBE, probe, methods=["POST"])
    app.add_api_route(PARCEL, parcel, methods=["POST"], response_model=None)


def _annotate(*endpoints: Any) -> None:
    """What FastAPI gives them: annotations are texts here, which it would look up where they cannot be seen."""
    from fastapi import Request

    for endpoint in endpoints:
        endpoint.__annotations__["request"] = Request


def _manager(app: Any) -> Any:
    return app.state.openai_serving_chat.tokenizer_manager


async def _json(request: Any) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is a JSON object with segments: {error!s:.80}") from error
