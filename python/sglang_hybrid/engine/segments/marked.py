"""What a request marks, as `custom_params`: checked in the HTTP process, read in the scheduler."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache.boundaries import counted
from sglang_hybrid.segment.geometry import MOST_SEGMENTS, Range, checked

KEY = "segments"
"""Key of a request's `custom_params`: [[start, end], ...], token positions of its prompt."""

LOST = "segments_lost"
"""Key beside it: how many marks of the request became plain text, for they have no place in its prompt."""

AHEAD = "segments_ahead"
"""Key beside it: its segments are made for a request that comes behind it, which tells why."""


def marks(custom_params: Any) -> bool:
    """Whether a request says anything of segments."""
    return isinstance(custom_params, dict) and custom_params.get(KEY) is not None


def named(custom_params: Any, prompt_tokens: int) -> tuple[Range, ...]:
    """The segments of a request; raises ConfigError, which names the field, for what is none in its prompt."""
    if not marks(custom_params):
        return ()
    try:
        return checked(custom_params[KEY], prompt_tokens)
    except ConfigError as error:
        raise ConfigError(f"custom_params.{KEY}: {error}") from error


def ahead(custom_params: Any) -> bool:
    """Whether a request makes its segments for one that comes behind it."""
    return isinstance(custom_params, dict) and custom_params.get(AHEAD) is True


def lost(custom_params: Any) -> int:
    """How many marks became plain text."""
    return counted(custom_params, LOST, MOST_SEGMENTS)
