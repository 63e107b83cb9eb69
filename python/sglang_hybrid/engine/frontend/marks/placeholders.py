"""Marks in prompts with images: a template writes one token for an image, its processor puts as many as it has there.

A mark is placed in the prompt as the template wrote it. Once the processor is done, the two prompts are walked side by
side: what stands once in the first and several times in the second is an image. Between the frames of a video some
processors write times, which nothing in the first prompt stands for: marks before and behind it are found all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.engine.cache import boundaries

logger = logging.getLogger(__name__)

_KEY = "cache_boundaries_before_images"
"""Key of `custom_params` from a chat's rendering to its tokens. A client's value under it is no `Placed`."""


@dataclass(frozen=True)
class Placed:
    """Positions of marks in a prompt whose images are one token each, and that prompt."""

    positions: tuple[int, ...]
    ids: Sequence[int]


def remember(params: dict[str, Any], positions: Sequence[int], ids: Sequence[int]) -> None:
    """Put marks into `custom_params` until the images have their tokens."""
    params[_KEY] = Placed(tuple(positions), ids)


def place(obj: Any, ids: Sequence[int]) -> None:
    """Replace what `remember` put into the request `obj` by boundaries in its prompt `ids`."""
    params = obj.sampling_params or {}
    custom = params.get("custom_params")
    if not isinstance(custom, dict) or not isinstance(custom.get(_KEY), Placed):
        return
    custom = dict(custom)  # the samples of a prompt share one
    placed: Placed = custom.pop(_KEY)
    found = expanded(placed, ids)
    if lost := len(placed.positions) - len(found):
        logger.warning("%d of %d cache breakpoints have no place behind the images", lost, len(placed.positions))
        custom[boundaries.LOST] = boundaries.lost_breakpoints(custom) + lost
    if found:
        boundaries.add(custom, found)
    obj.sampling_params = {**params, "custom_params": custom}


def expanded(placed: Placed, ids: Sequence[int]) -> list[int]:
    """Where the marks are in `ids`, without those between two places where more than repeated tokens differs.

    The prompts are walked from both ends, so one that lies before or behind all such places is found.
    """
    ends = _walk(placed.ids, ids)
    back = _walk(placed.ids[::-1], ids[::-1])
    found = []
    for position in placed.positions:
        behind = len(placed.ids) - position
        if position < len(ends):
            found.append(ends[position])
        elif 0 <= behind < len(back):
            found.append(len(ids) - back[behind])
    return found


def _walk(short: Sequence[int], long: Sequence[int]) -> list[int]:
    """How many tokens of `long` the first 0, 1, 2, ... tokens of `short` are, as far as the two go together."""
    ends, at, last = [0], 0, len(long)
    for index, token in enumerate(short):
        if at == last or long[at] != token:
            return ends
        at += 1
        if index + 1 == len(short) or short[index + 1] != token:
            while at < last and long[at] == token:
                at += 1
        ends.append(at)
    return ends if at == last else ends[:-1]
