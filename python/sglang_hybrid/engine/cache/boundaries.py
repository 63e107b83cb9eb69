"""Positions of a prompt that others will share: named by the request, or where messages of a conversation end.

The HTTP process checks what a request names (`engine/frontend`), the scheduler reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.admission import MOST_POSITIONS

KEY = "cache_boundaries"
"""Key of a request's `custom_params`: token positions, counted from the start of its prompt."""

LOST = "cache_breakpoints_lost"
"""Key beside it: how many of the marks of a chat request have no place in its prompt."""


def named(custom_params: Any, prompt_tokens: int) -> tuple[int, ...]:
    """The positions a request names; raises ConfigError if they are no positions in its prompt."""
    given = (custom_params or {}).get(KEY, ()) if isinstance(custom_params, (dict, type(None))) else ()
    if not isinstance(given, (list, tuple)) or any(type(at) is not int for at in given):
        raise ConfigError(f"custom_params.{KEY} is a list of token positions: {given!r}")
    if len(given) > MOST_POSITIONS:
        raise ConfigError(f"custom_params.{KEY} names at most {MOST_POSITIONS} positions: {len(given)}")
    if any(not 0 < at <= prompt_tokens for at in given):
        raise ConfigError(
            f"custom_params.{KEY} are positions in the prompt, which has {prompt_tokens} tokens: {list(given)}"
        )
    return tuple(sorted(set(given)))


def add(custom_params: dict[str, Any], positions: Iterable[int]) -> None:
    """Name `positions` beside those that the request names itself; what is no list of these is refused later."""
    given = custom_params.get(KEY, [])
    custom_params[KEY] = [*given, *positions] if isinstance(given, list) else given


def cut(custom_params: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """`custom_params` for a prompt of which `prompt_tokens` were left: marks behind them have lost their place."""
    given = custom_params.get(KEY)
    if not isinstance(given, list):
        return custom_params
    kept = [at for at in given if type(at) is not int or at <= prompt_tokens]
    lost = lost_breakpoints(custom_params) + len(given) - len(kept)
    return {**custom_params, KEY: kept, LOST: min(lost, MOST_POSITIONS)}


def lost_breakpoints(custom_params: Any) -> int:
    """How many marks of the request have no place in its prompt."""
    return counted(custom_params, LOST, MOST_POSITIONS)


def counted(custom_params: Any, key: str, most: int) -> int:
    """The number under `key`, 0 if there is none from 1 to `most`: a client can say anything here, nothing large."""
    count = custom_params.get(key, 0) if isinstance(custom_params, dict) else 0
    return count if type(count) is int and 0 < count <= most else 0


def first_message(tokens: np.ndarray, ends: Iterable[int]) -> tuple[int, ...]:
    """The position behind the first token of `tokens` that ends a message (a system prompt), if more follows."""
    first = tokens.size
    for end in ends:
        found = tokens[:first] == end
        if found.size and found[at := int(found.argmax())]:
            first = at
    return (first + 1,) if first + 1 < tokens.size else ()


def last_message(tokens: np.ndarray, ends: Iterable[int]) -> tuple[int, ...]:
    """The position behind the last token of `tokens` that ends a message, if more follows: the opening of an answer.

    The next prompt need not begin with that: templates open an answer with `<think>` and leave thoughts out later.
    """
    last = max((int(found[-1]) for end in ends if (found := np.flatnonzero(tokens == end)).size), default=-1)
    return (last + 1,) if 0 <= last < tokens.size - 1 else ()
