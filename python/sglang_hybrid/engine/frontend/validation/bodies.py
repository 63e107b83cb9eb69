"""The body of an HTTP request: how large it may be, as it comes and once it is decompressed."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang_hybrid.engine.frontend.settings import settings

COMPRESSED = "compressed"
"""The feature of servers that take compressed bodies, in `surface`."""

_PIECE = 1 << 20

WEIGHTS = "_from_tensor"
"""In the paths that take a model's weights as their body: as long as the model."""


async def stream(original: Callable[..., Any], request: Any) -> AsyncIterator[bytes]:
    """The chunks of a body; one that is longer than allowed, or says so, is refused with 413."""
    from fastapi import HTTPException

    if WEIGHTS in request.url.path:
        async for chunk in original(request):
            yield chunk
        return
    most = _most()
    declared = request.headers.get("content-length", "")
    received = int(declared) if declared.isdecimal() else 0
    if received <= most:
        received = 0
        async for chunk in original(request):
            received += len(chunk)
            if received > most:
                break
            yield chunk
    if received > most:
        raise HTTPException(413, _too_long(most, received))


def features() -> list[str]:
    """What of `surface` is for this server's bodies."""
    from sglang.srt.environ import envs

    return [COMPRESSED] if envs.SGLANG_ENABLE_REQUEST_DECOMPRESSION.get() else []


async def decompress(
    original: Callable[..., Any], middleware: Any, scope: Any, receive: Callable[[], Any], send: Callable[..., Any]
) -> None:
    """AROUND hook of the middleware that decompresses bodies: one that is longer than allowed is refused with 413.

    SGLang holds all of it, compressed and plain, before anything looks at its length: of some kilobytes gigabytes.
    """
    from fastapi.responses import JSONResponse
    from starlette.datastructures import Headers

    compressed = scope["type"] == "http" and Headers(scope=scope).get("x-body-compressed") == "zstd"
    if not compressed or WEIGHTS in scope["path"]:
        return await original(middleware, scope, receive, send)
    most, raw, message = _most(), bytearray(), {"more_body": True}
    while message.get("more_body") and len(raw) <= most:
        message = await receive()
        raw += message.get("body", b"")  # none of a client that hung up
    plain = len(raw) if len(raw) > most else await asyncio.to_thread(_plain_bytes, bytes(raw), most)
    if plain > most:
        said = {"object": "error", "message": _too_long(most, plain), "type": "413", "code": 413}
        return await JSONResponse(said, 413)(scope, receive, send)
    left = [{**message, "body": bytes(raw)}] if message["type"] == "http.request" else [message]

    async def again() -> Any:
        return left.pop() if left else await receive()

    await original(middleware, scope, again, send)


def _plain_bytes(raw: bytes, most: int) -> int:
    """The length of a body once it is decompressed, counted until it is more than `most`; 0 of one that is damaged."""
    import zstandard

    found = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)) as reader:
            while found <= most and (piece := reader.read(_PIECE)):
                found += len(piece)
    except zstandard.ZstdError:
        return 0  # SGLang says so
    return found


def _most() -> int:
    return int(settings().max_body_mb * 1e6)


def _too_long(most: int, received: int) -> str:
    return f"a body has at most {most} bytes (--hybrid-max-body-mb); send less: {received}"
