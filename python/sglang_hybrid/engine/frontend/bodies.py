"""The body of an HTTP request: how large it may be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang_hybrid.engine.frontend.settings import settings

WEIGHTS = "_from_tensor"
"""In the paths that take a model's weights as their body: as long as the model."""


async def stream(original: Callable[..., Any], request: Any) -> AsyncIterator[bytes]:
    """The chunks of a body; one that is longer than allowed, or says so, is refused with 413."""
    from fastapi import HTTPException

    if WEIGHTS in request.url.path:
        async for chunk in original(request):
            yield chunk
        return
    most = int(settings().max_body_mb * 1e6)
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
        raise HTTPException(413, f"a body has at most {most} bytes (--hybrid-max-body-mb); send less: {received}")
