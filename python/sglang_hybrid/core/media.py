"""Images, videos and sounds in the body of a request: what a server checks and a router keeps together."""

from __future__ import annotations

from typing import Any

FIELDS = ("image_data", "video_data", "audio_data")
"""Of SGLang's native endpoint."""

_KINDS = ("image", "video", "audio")


def is_media(part: Any) -> bool:
    """Whether a part of a message is an image, a video or a sound, in the words of any endpoint."""
    return isinstance(part, dict) and str(part.get("type", "")).removeprefix("input_").removesuffix("_url") in _KINDS
