"""`/hybrid/segments`: compute segments before they are needed (POST), list them (GET), drop them (DELETE).

The routes are added by the first HTTP request that an application of SGLang's gets: its workers load this package when
the application is there already. Listing and dropping are the administrator's, as `/flush_cache` is.
"""

from __future__ import annotations

import random
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import hints
from sglang_hybrid.engine.frontend.limits import KEY as MOST_KEY
from sglang_hybrid.engine.frontend.limits import shown
from sglang_hybrid.engine.frontend.segments import prompts
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.segments import marked
from sglang_hybrid.engine.segments.listing import METHOD, MOST_LISTED
from sglang_hybrid.segment.geometry import MOST_SEGMENTS

PATH = "/hybrid/segments"
_FIELDS = ("segments", "cache_salt", "extra_key", "model")
_ADDED = "sglang_hybrid_segments"
_DIGITS = frozenset("0123456789abcdef")
_LEAD = 4


def open_routes(app: Any, scope: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook of an application that is called: give SGLang's the routes, once."""
    state = app.state
    if scope["type"] != "http" or settings().segments != "on" or hasattr(state, _ADDED):
        return
    if not hasattr(state, "openai_serving_chat"):
        return
    from fastapi import Request
    from sglang.srt.utils.auth import AuthLevel, auth_level

    administrative = auth_level(AuthLevel.ADMIN_OPTIONAL)

    async def warm_up(request: Request) -> dict[str, Any]:
        return await warm(_manager(app), await _json(request), request)

    @administrative
    async def list_segments(request: Request) -> dict[str, Any]:
        limit = request.query_params.get("limit", "1000")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 5 and int(limit) <= MOST_LISTED):
            raise ConfigError(f"limit is a number of segments from 0 to {MOST_LISTED}: {shown(limit)}")
        said = await ask(_manager(app), {"list": int(limit)})
        return {"segments": said.pop("entries"), **said}

    @administrative
    async def drop_all() -> dict[str, Any]:
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

    # The annotations are texts here, which FastAPI would look up where these functions cannot be seen.
    for endpoint in (warm_up, list_segments):
        endpoint.__annotations__["request"] = Request
    app.add_api_route(PATH, warm_up, methods=["POST"])
    app.add_api_route(PATH, list_segments, methods=["GET"])
    app.add_api_route(PATH, drop_all, methods=["DELETE"])
    app.add_api_route(PATH + "/{key}", drop_one, methods=["DELETE"])
    setattr(state, _ADDED, True)


def _manager(app: Any) -> Any:
    return app.state.openai_serving_chat.tokenizer_manager


async def _json(request: Any) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is a JSON object with segments: {error!s:.80}") from error


async def warm(manager: Any, body: Any, request: Any = None) -> dict[str, Any]:
    """Compute the segments of `body` and keep them; what is kept of each. Raises ConfigError, which names the field."""
    given, tenant = _given(manager, body)
    from sglang.srt.managers.io_struct import GenerateReqInput

    # Behind tokens that no prompt begins with, or else a prefix that is cached might save what is to be computed.
    vocabulary = range(int(manager.model_config.vocab_size))
    prompts_ = [[*random.choices(vocabulary, k=_LEAD), *ids, ids[-1]] for ids in given]
    params = [
        {"max_new_tokens": 1, "custom_params": {marked.KEY: [[_LEAD, _LEAD + len(ids)]], hints.KEY: {"final": True}}}
        for ids in given
    ]
    obj = GenerateReqInput(input_ids=prompts_, sampling_params=params, **tenant)
    (answers,) = [each async for each in manager.generate_request(obj, request)]
    names = (tenant.get("extra_key"), tenant.get("cache_salt"))
    namespace = None if names == (None, None) else repr(names)
    found = (await ask(manager, {"find": given, "namespace": namespace}))["entries"]
    return {"segments": [_said(entry, ids, done) for entry, ids, done in zip(found, given, answers, strict=True)]}


def _said(entry: dict[str, Any], ids: list[int], answer: dict[str, Any]) -> dict[str, Any]:
    """What a client is told of one of its segments: `reason` is why it was computed, or why it is not kept."""
    details = answer["meta_info"].get("cached_tokens_details") or {}
    reasons = [key.removeprefix("miss_") for key in details if key.startswith("miss_segment_")]
    why = [reason for reason in reasons if reason != "segment_seam"]
    kept = "bytes" in entry
    said = {"key": entry["key"], "tokens": len(ids), "kept": kept, "reason": why[0] if why else None}
    return {**said, "bytes": entry["bytes"]} if kept else said


def _given(manager: Any, body: Any) -> tuple[list[list[int]], dict[str, str]]:
    """The token ids of each segment, and the tenant's names."""
    if not isinstance(body, dict) or not isinstance(body.get("segments"), list):
        raise ConfigError(f"the body is an object with segments, a list of texts and lists of token ids: {shown(body)}")
    for name in body:
        if name not in _FIELDS:
            raise ConfigError(f"the body has {', '.join(_FIELDS)}; adapters have no segments: {shown(name)}")
    given = body["segments"]
    if not 0 < len(given) <= MOST_SEGMENTS:
        raise ConfigError(f"segments are 1 to {MOST_SEGMENTS} texts or lists of token ids: {len(given)}")
    tenant = {}
    for name in ("cache_salt", "extra_key"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > MOST_KEY:
            raise ConfigError(f"{name} is a text of at most {MOST_KEY} characters: {shown(value)}")
        tenant[name] = value
    made = []
    for number, each in enumerate(given):
        ids = _ids(manager, f"segments.{number}", each)
        most = manager.context_len - _LEAD - 2  # a token behind it, and one of an answer
        if len(ids) > most:
            raise ConfigError(f"segments.{number} has at most {most} tokens, to fit the context; split it: {len(ids)}")
        made.append(ids)
    return made, tenant


def _ids(manager: Any, field: str, given: Any) -> list[int]:
    if isinstance(given, str):
        if manager.tokenizer is None:
            raise ConfigError(f"{field} is a list of token ids, for this server has no tokenizer: {shown(given)}")
        ids = prompts.alone(manager.tokenizer, given)
        where = prompts.segment(manager.tokenizer, given, ids)
        if where is None:
            raise ConfigError(f"{field} is a text with tokens, none of them a special one: {shown(given)}")
        return ids[where[0] : where[1]]
    vocabulary = int(manager.model_config.vocab_size)
    if not isinstance(given, list) or not given or any(type(token) is not int for token in given):
        raise ConfigError(f"{field} is a text or a list of token ids, not an empty one: {shown(given)}")
    if not 0 <= min(given) <= max(given) < vocabulary:
        raise ConfigError(f"{field} has token ids of the vocabulary, 0 to {vocabulary - 1}: {shown(given)}")
    return list(given)


async def ask(manager: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A question to the scheduler (`segments.listing`), and its answer; raises ConfigError if it has none."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    (answer,) = await manager.dumper_control(DumperControlReqInput(method=METHOD, body=body))
    if not answer.success:
        raise ConfigError(answer.error)
    found: dict[str, Any] = answer.response[0]
    return found
