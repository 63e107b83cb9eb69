"""Requests with images, videos or sounds: which of them begin alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sglang_hybrid.core.media import FIELDS, is_media


def beginning(body: dict[str, Any]) -> list[Any] | None:
    """All of `body` up to its first image, video or sound; None where it has none.

    A chat's later turns, and other questions about the same image behind the same words, begin alike.
    """
    for name in FIELDS:
        if body.get(name):
            first = body[name]
            while isinstance(first, list) and first:
                first = first[0]
            return [name, first]
    for field in ("messages", "input"):
        messages = body.get(field)
        for at, message in enumerate(messages if isinstance(messages, list) else ()):
            parts = message.get("content") if isinstance(message, dict) else None
            for below, part in enumerate(parts if isinstance(parts, list) else ()):
                if any(map(is_media, (part, *_within(part)))):
                    return [body.get("system"), messages[:at], parts[: below + 1]]
    return None


def name_of(start: list[Any]) -> str | None:
    """One name for all that begins so; None for what is nested too deep, which a worker will refuse."""
    try:
        return hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        return None


def _within(part: Any) -> list[Any]:
    """What a tool's result holds."""
    inner = part.get("content") if isinstance(part, dict) else None
    return inner if isinstance(inner, list) else []
