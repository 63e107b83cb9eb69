"""Requests with images, videos or sounds: which of them begin alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_NATIVE = ("image_data", "video_data", "audio_data")
_KINDS = ("image", "video", "audio")


def beginning(body: dict[str, Any]) -> str | None:
    """A name for all of `body` up to its first image, video or sound; None where it has none.

    A chat's later turns, and other questions about the same image behind the same words, have the same name.
    """
    for name in _NATIVE:
        if body.get(name):
            first = body[name]
            while isinstance(first, list) and first:
                first = first[0]
            return _name([name, first])
    for field in ("messages", "input"):
        messages = body.get(field)
        for at, message in enumerate(messages if isinstance(messages, list) else ()):
            parts = message.get("content") if isinstance(message, dict) else None
            for below, part in enumerate(parts if isinstance(parts, list) else ()):
                if _is_media(part):
                    return _name([body.get("system"), messages[:at], parts[: below + 1]])
    return None


def _is_media(part: Any) -> bool:
    inner = part.get("content") if isinstance(part, dict) else None
    within = inner if isinstance(inner, list) else ()  # of a tool's result
    return any(isinstance(each, dict) and _kind(each) in _KINDS for each in (part, *within))


def _kind(part: dict[str, Any]) -> str:
    return str(part.get("type", "")).removeprefix("input_").removesuffix("_url")


def _name(value: Any) -> str:
    try:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        return ""  # the worker will refuse it
