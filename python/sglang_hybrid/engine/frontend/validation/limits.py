"""What one request may ask of a server. docs/security.md lists the same, with what each bound protects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError

NAME = 256
"""Characters of an identifier a client chooses: request, session, adapter, conversation. Names stand in logs."""

KEY = 1_024
"""Characters of a cache salt, extra key or routing key."""

PRIORITY = 2**31 - 1
"""Largest priority, either way."""

GRAMMAR = 65_536
"""Characters of a regex, EBNF, JSON schema or structural tag; compiling takes seconds at this size."""

TAG = 4 * GRAMMAR
"""Characters of a structural tag: SGLang makes one of the schemas of all strict tools of a chat."""

GRAMMARS = 2**22
"""Characters of all grammars whose compiled form a scheduler keeps."""

STOPS = 32
"""Stop strings, and stop patterns, of one request."""

STOP = 1_024
"""Characters of a stop string: every decode step searches the text for it."""

PATTERN = 256
"""Characters of a stop pattern, SGLang's own number since 0.5.21."""

STOP_STEPS = 8_192
"""Characters that the stop patterns of a request may compare from one position of the text."""

STOP_SPAN = 512
"""Tokens that a match of a stop pattern with an endless repeat may span."""

BIAS = 1e30
"""Largest logit bias, either way: what overflows float32, divided by a temperature, becomes NaN for the whole batch."""

LEAST_REPETITION_PENALTY = 0.01
"""Logits are divided by the repetition penalty: a smaller one overflows float32."""

TOP_K = 2**30
"""Largest top_k, SGLang's own number for the whole vocabulary; beyond 2**31 the batch's tensor overflows."""

LEVELS = 64
"""Levels of nesting in a value that is passed on as it came, such as `custom_params`."""

WEIGHT = 2**22
"""Values in the sampling parameters of a request times its sequences; eight characters of a text count as one value."""

TOKENS = 2**25
"""Tokens of a prompt times the sequences sampled from it: each has its own copy in HTTP process and scheduler."""

LOGPROBS = 2**24
"""Log-probabilities of one prompt: positions times tokens per position times sequences; a hundred bytes each."""


def shown(value: Any) -> str:
    """A value for the end of an error message: one line, at most 80 characters, whatever it holds."""
    try:
        text = repr(value[:80]) if isinstance(value, (str, bytes)) else repr(value)[:2_000]
    except RecursionError:
        text = f"a {type(value).__name__} of too many levels"
    return text if len(text) <= 80 else text[:77] + "..."


def given_values(value: Any) -> list[Any]:
    """What a field holds that takes one value for all prompts of a request or a list of one each; None is no value."""
    return [each for each in value if each is not None] if isinstance(value, list) else [] if value is None else [value]


def require_name(value: Any, what: str) -> None:
    """Raise ConfigError unless `value` is a short text without line breaks or control characters."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} is a text: {shown(value)}")
    if not 0 < len(value) <= NAME:
        raise ConfigError(f"{what} has 1 to {NAME} characters: {len(value)}")
    if not value.isprintable():
        raise ConfigError(f"{what} has no line breaks or control characters: {shown(value)}")


def require_key(value: Any, what: str) -> None:
    """Raise ConfigError unless `value` is a text that may keep tenants apart."""
    if not isinstance(value, str) or len(value) > KEY:
        raise ConfigError(f"{what} is a text of at most {KEY} characters: {shown(value)}")


def require_integer(value: Any, least: int, most: int, what: str) -> None:
    """Raise ConfigError unless `value` is a whole number in [least, most]."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{what} is a whole number from {least} to {most}: {shown(value)}")


def require_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raise ConfigError for token ids that no vocabulary of that size has."""
    if len(ids) and not 0 <= min(ids) <= max(ids) < vocabulary:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ConfigError(f"token ids are those of the vocabulary, 0 to {vocabulary - 1}: {wrong}")


def weight(value: Any, what: str) -> int:
    """Values in `value`, eight characters of text counting as one.

    Raises ConfigError beyond `LEVELS` of nesting, and beyond WEIGHT as soon as it is seen: the event loop waits here.
    """
    total, level = 0, [value]
    for _ in range(LEVELS + 1):
        below: list[Any] = []
        for each in level:
            total += 1
            if isinstance(each, str):
                total += len(each) // 8
            elif isinstance(each, dict):
                below += each.keys()
                below += each.values()
            elif isinstance(each, (list, tuple, set)):
                below += each
            if total + len(below) > WEIGHT:
                raise ConfigError(f"{what} hold at most {WEIGHT} values; send fewer: {total + len(below)} or more")
        level = below
        if not level:
            return total
    raise ConfigError(f"{what} is nested at most {LEVELS} levels deep: {shown(value)}")
