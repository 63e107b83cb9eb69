"""Which pages the prompt of a request has. The router has no tokenizer and no template: it asks a worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
import orjson

from sglang_hybrid.cluster import media
from sglang_hybrid.cluster.mistakes import Seldom
from sglang_hybrid.cluster.worker import Worker
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.tree.tokens import as_tokens
from sglang_hybrid.routing.index import block_hashes

ENDPOINTS = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
"""Whose requests have a prompt that a cache can know."""

PATIENCE_S = 5.0

_JSON = {"Content-Type": "application/json"}

logger = logging.getLogger(__name__)


class Pages(NamedTuple):
    """A prompt of `tokens` tokens, as far as it is known; `names` are those of the whole pages before its last one.

    `by_session`: it has images, whose tokens nobody knows before a worker's processor, and goes where its session is.
    """

    tokens: int = 0
    names: Sequence[int] = ()
    by_session: bool = False


UNKNOWN = Pages()
IMAGES = Pages(by_session=True)


def json_of(raw: bytes) -> dict[str, Any] | None:
    """An object in JSON, None for anything else."""
    with suppress(ValueError):
        body = orjson.loads(raw)
        if isinstance(body, dict):
            return body
    return None


def session_of(body: dict[str, Any] | None) -> str | None:
    """What the client calls the requests that this one belongs to; those of two tenants never belong together.

    Without a name, requests that are the same up to their first image belong together.
    """
    if not body:
        return None
    key = body.get("prompt_cache_key")
    if not (isinstance(key, str) and key):
        start = media.beginning(body)
        key = None if start is None else media.name_of(start)
    return f"{body.get('cache_salt')}/{key}" if key else None


def _of_ids(ids: Any, page_tokens: int, salt: Any) -> Pages:
    """Pages of a prompt that is tokens already; of several prompts those of the first."""
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        ids = ids[0]
    try:
        tokens = as_tokens(ids)
    except (ConfigError, ValueError, OverflowError):  # the worker will say what is wrong with it
        return UNKNOWN
    return Pages(tokens.size, block_hashes(tokens[:-1], page_tokens, salt if isinstance(salt, str) else None))


async def pages_of(
    endpoint: str,
    body: dict[str, Any],
    page_tokens: int,
    worker: Worker,
    session: aiohttp.ClientSession,
    headers: dict[str, str],
) -> Pages:
    """The pages of a request to `endpoint`, `worker` rendering and tokenising it where it is no tokens yet.

    UNKNOWN for what no worker could tell, such as a body that will be refused or is nested too deep.
    """
    if media.beginning(body) is not None:
        return IMAGES
    salt = body.get("cache_salt")
    given = body.get("prompt") if endpoint == "/v1/completions" else body.get("input_ids")
    if isinstance(given, list) and given and not isinstance(given[0], str):
        return _of_ids(given, page_tokens, salt)
    asked = dict(body)
    for name in ("text", "prompt"):
        if isinstance(asked.get(name), list) and asked[name]:
            asked[name] = asked[name][0]
    wanted = {"prompt": "", "request": {"endpoint": endpoint, "body": asked, "page_tokens": page_tokens}}
    try:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        url, raw, sent = worker.url + "/v1/tokenize", json.dumps(wanted).encode(), {**headers, **_JSON}
        async with session.post(url, data=raw, headers=sent, timeout=timeout) as answer:
            text = await answer.text()
        told = json.loads(text) if answer.status == 200 else {}
        tokens, names = told.get("count"), told.get("names")
        if type(tokens) is int and isinstance(names, list) and all(type(name) is int for name in names):
            return Pages(tokens, names)
        _doubt(worker, f"{answer.status} {text[:200]}")
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError, RecursionError) as error:
        _doubt(worker, str(error) or type(error).__name__)
    return UNKNOWN


_doubts = Seldom()


def _doubt(worker: Worker, what: str) -> None:
    """A prompt is unknown: its body may be a client's mistake. Said seldom, for more of them tell of another."""
    if _doubts.due():
        logger.warning("a prompt is sent by load alone, for worker %s does not tell its pages: %s", worker, what)
