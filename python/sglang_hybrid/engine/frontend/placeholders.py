"""Marks in prompts with images: a template writes one token for an image, its processor puts as many as it has there.

A mark is placed in the prompt as the template wrote it. Once the processor is done, the two prompts are walked side by
side: what stands once in the first and several times in the second is an image.
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
    if found is None:
        logger.warning("%d cache breakpoints have no place: the images changed the prompt", len(placed.positions))
        custom[boundaries.LOST] = custom.get(boundaries.LOST, 0) + len(placed.positions)
    else:
        given = custom.get(boundaries.KEY, [])
        custom[boundaries.KEY] = [*given, *found] if isinstance(given, list) else given
    obj.sampling_params = {**params, "custom_params": custom}


def expanded(placed: Placed, ids: Sequence[int]) -> list[int] | None:
    """The positions in `ids`; None if more than repeated tokens tells the two prompts apart."""
    ends = [0]  # of each token of the first prompt, in the second
    at, last = 0, len(ids)
    for index, token in enumerate(placed.ids):
        if at == last or ids[at] != token:
            return None
        at += 1
        following = placed.ids[index + 1] if index + 1 < len(placed.ids) else None
        if token != following:
            while at < last and ids[at] == token:
                at += 1
        ends.append(at)
    return [ends[position] for position in placed.positions] if at == last else None
