"""What the body of a chat request says of the time behind it, in the words of chat clients."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache.hints import hints_of, lifetime_s
from sglang_hybrid.engine.frontend.validation.limits import KEY, shown
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints

HINTS, RETENTION, CACHE_KEY, OPTIONS = (
    "cache_hints", "prompt_cache_retention", "prompt_cache_key", "prompt_cache_options",
)  # fmt: skip
_MODES = ("implicit", "explicit")
_RETENTIONS_S = {"in_memory": -1.0, "in-memory": -1.0, "24h": 86_400.0}


def body_hints(body: Any, ttls: list[Any], anthropic: bool = False) -> Hints:
    """The hints of a body whose marks have the lifetimes `ttls`; raises ConfigError, which names the field.

    The longest lifetime counts for all marks.
    """
    if not isinstance(body, dict):
        return NO_HINTS
    said = body.get(HINTS)
    found = NO_HINTS if said is None else hints_of(said, HINTS)
    longest = max([seconds for text in ttls if (seconds := lifetime_s(text)) is not None], default=-1.0)
    if not anthropic:
        longest = max(longest, _retention(body), _options(body))
        key = body.get(CACHE_KEY)
        if key is not None and not (isinstance(key, str) and len(key) <= KEY):
            raise ConfigError(f"{CACHE_KEY} is a text of at most {KEY} characters: {shown(key)}")
    if found.lifetime_s < 0 <= longest:
        found = found._replace(lifetime_s=longest)
    return found


def _options(body: dict[str, Any]) -> float:
    """The lifetime in OpenAI's options. Their `mode` is checked; our own boundaries compete by worth either way."""
    given = body.get(OPTIONS)
    if given is None:
        return -1.0
    if not isinstance(given, dict):
        raise ConfigError(f"{OPTIONS} is an object: {shown(given)}")
    if given.get("mode") is not None and given["mode"] not in _MODES:
        raise ConfigError(f"{OPTIONS}.mode is {' or '.join(map(repr, _MODES))}: {shown(given['mode'])}")
    ttl = given.get("ttl")
    if ttl is None:
        return -1.0
    seconds = lifetime_s(ttl)
    if seconds is None:
        raise ConfigError(f"{OPTIONS}.ttl is a time as '30m': {shown(ttl)}")
    return seconds


def _retention(body: dict[str, Any]) -> float:
    given = body.get(RETENTION)
    if given is None:
        return -1.0
    if not isinstance(given, str) or given not in _RETENTIONS_S:
        raise ConfigError(f"{RETENTION} is {' or '.join(map(repr, _RETENTIONS_S))}: {shown(given)}")
    return _RETENTIONS_S[given]
