"""Images, videos and sounds as they come: how many, from where, how large. SGLang takes anything here."""

from __future__ import annotations

import binascii
import os
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any
from urllib.parse import unquote, urlparse

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.media import FIELDS
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.frontend.validation.limits import require_ids, shown, weight

_REMOTE = ("http://", "https://")
_PATH = 256
"""Characters of a text with a slash in front that is taken for a path: base64 of any JPEG begins so, and is longer."""

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]++={0,2}\s*+")
"""Never tried again from another place: a client's text may be as long as a body."""


def require_shape(obj: Any, prompts: int, single: bool) -> None:
    """Raise ConfigError for images, videos or sounds that are not one entry per prompt."""
    embedding = hasattr(obj, "is_cross_encoder_request")  # SGLang repeats neither media nor ids for those
    for name in FIELDS:
        value = getattr(obj, name, None)
        if isinstance(value, (bool, int, float)):
            raise ConfigError(f"{name} is a text, an object, or a list of these: {shown(value)}")
        wrong = len(value) != prompts if isinstance(value, list) else embedding
        if value and not single and wrong:
            raise ConfigError(f"{name} is a list with one entry per prompt ({prompts}): {shown(value)}")
    if not single and isinstance(obj.rid, str) and embedding:
        raise ConfigError(f"rid is a list of one per prompt ({prompts}), for embeddings: {shown(obj.rid)}")


def given(obj: Any) -> bool:
    """Whether a request has images, videos or sounds."""
    return any(getattr(obj, name, None) for name in FIELDS)


def require_sources(obj: Any, vocabulary: int, trusts_hashes: bool) -> None:
    """Check where the images, videos and sounds of a request over HTTP come from, and how large its images are.

    Paths are those of the server's machine, so they are read below `--hybrid-media-folder` only: SGLang reads every
    file there is, and `/dev/zero` until memory ends. Base64 without a `data:` in front gets one, for it may begin like
    a path, as that of every JPEG does. Hashes by which SGLang would take one image for another are refused.
    It reads headers of files that clients made, so it is called in a thread.
    """
    prompts = obj.input_ids or ()
    for ids in prompts if prompts and isinstance(prompts[0], list) else (prompts,):
        require_ids(ids, vocabulary)  # processors turn them back into text, which fails for others
    if getattr(obj, "mm_hashes", None) and not trusts_hashes:
        raise ConfigError(
            "mm_hashes say which image an image is, so who sends them may pass one off for another; leave them out, or "
            "start the server with --trust-mm-content-hashes if a gateway of yours sets them"
        )
    pixels = 0.0
    for name in FIELDS:
        weight(getattr(obj, name, None), name)  # it is nested no deeper than what follows can go
        for source, put in _sources(obj, name):
            checked = _checked(source, name)
            if checked is not source:
                put(checked)
            if name == "image_data":
                pixels += _pixels(checked)
    if (most := settings().max_megapixels * 1e6) < pixels:
        raise ConfigError(
            f"the images of one request have at most {most / 1e6:g} million pixels (--hybrid-max-megapixels); send "
            f"smaller ones, or several requests: {pixels / 1e6:.1f} million"
        )


def _sources(obj: Any, name: str) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Every text or object that stands for an image, video or sound, and how to put another in its place."""
    value = getattr(obj, name, None)
    if isinstance(value, list):
        yield from _listed(value)
    elif value is not None:
        yield from _named(value, lambda new: setattr(obj, name, new))


def _listed(values: list[Any]) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    for index, each in enumerate(values):
        if isinstance(each, list):
            yield from _listed(each)
        elif each is not None:
            yield from _named(each, lambda new, index=index: values.__setitem__(index, new))  # type: ignore[misc]


def _named(value: Any, put: Callable[[Any], None]) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """SGLang's objects of chats hold theirs under `url`."""
    if isinstance(getattr(value, "url", None), str):
        yield value.url, lambda new: setattr(value, "url", new)
    else:
        yield value, put


def _checked(source: Any, name: str) -> Any:
    """`source`, with `data:` in front where it is base64 alone; raises ConfigError for what SGLang must not read."""
    if isinstance(source, dict):
        if "format" in source:
            raise ConfigError(
                f"{name} that a processor has seen are tensors, which HTTP does not carry; send the image, video or "
                f"sound itself, or use sglang_hybrid.Engine: format {shown(source['format'])}"
            )
        return source
    if not isinstance(source, str) or source.startswith(("data:", *_REMOTE)):
        return source
    path = source.removeprefix("video:") if name == "image_data" else source
    path = unquote(urlparse(path).path) if path.startswith("file://") else path
    if (folder := settings().media_folder) and _below(path, folder):
        return source
    if path is source and (len(source) > _PATH or not source.startswith("/")) and _BASE64.fullmatch(source):
        return f"data:;base64,{source}"
    where = f"below {folder} (--hybrid-media-folder)" if folder else "with --hybrid-media-folder only"
    raise ConfigError(
        f"{name} is read from the server's files {where}; send an http(s):// address, or the content as "
        f"data:TYPE;base64,...: {shown(source)}"
    )


def _below(path: str, folder: str) -> bool:
    try:
        found, root = os.path.realpath(path), os.path.realpath(folder)
        return os.path.commonpath((found, root)) == root and os.path.isfile(found)
    except (OSError, ValueError):
        return False


def _pixels(source: Any) -> int:
    """Pixels of an image that came with the request, from its header; 0 for others, and for what is no image."""
    if not isinstance(source, str) or not source.startswith("data:"):
        return 0
    from PIL import Image

    try:
        with Image.open(BytesIO(b64decode(source.partition(",")[2]))) as image:
            return int(image.width) * int(image.height)
    except Image.DecompressionBombError as error:
        raise ConfigError(f"an image is too large ({error})") from error
    except (binascii.Error, OSError, SyntaxError, ValueError):
        return 0  # SGLang says what is wrong with it
