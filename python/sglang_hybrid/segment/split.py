"""Prompts as text with a separator between segments, as LMCache's blending and HYPIC take them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.segment.geometry import MOST_SEGMENTS, Range


def split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators, empty ones too; [text] where there is no separator in it.

    Raises ConfigError for an empty separator and for more than `MOST_SEGMENTS` + 1 parts.
    """
    if not separator:
        raise ConfigError("a separator of segments needs at least one character")
    parts = text.split(separator, MOST_SEGMENTS + 1)
    if len(parts) > MOST_SEGMENTS + 1:
        raise ConfigError(f"a prompt may have {MOST_SEGMENTS} segments, this one has more: separator {separator!r}")
    return parts


def joined(parts: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[array[int], dict[int, Range]]:
    """Token ids of a prompt whose parts are tokenised by themselves, without separators, and its segments by the number
    of their part.

    So a part has the same tokens wherever it stands. The last part, the question, is no segment; empty parts are none.
    """
    ids: array[int] = array("q")
    ranges: dict[int, Range] = {}
    for number, part in enumerate(parts):
        start = len(ids)
        ids.extend(encode(part) if part else ())
        if len(ids) > start and number < len(parts) - 1:
            ranges[number] = (start, len(ids))
    return ids, ranges
