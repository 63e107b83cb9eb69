"""What a request says of the time behind it, as `custom_params`: checked in the HTTP process, read in the scheduler."""

from __future__ import annotations

import re
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.reuse.hints import NAMES, NO_HINTS, Hints

KEY = "cache_hints"
"""Key of a request's `custom_params`: an object with `final`, `back_in_s` and `lifetime_s`, each of them optional."""

MOST_S = 1e9
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LIFETIME = re.compile(r"[1-9][0-9]{0,7}[smh]")


def named_hints(custom_params: Any) -> Hints:
    """The hints of a request; raises ConfigError, which names the field, for what is none."""
    given = custom_params.get(KEY) if isinstance(custom_params, dict) else None
    return NO_HINTS if given is None else hints_of(given, f"custom_params.{KEY}")


def hints_of(given: Any, field: str) -> Hints:
    """The hints in the object `given`; raises ConfigError, which names a part of `field`."""
    if not isinstance(given, dict):
        raise ConfigError(f"{field} is an object: {given!r:.60}")
    for name in given:
        if name not in NAMES:
            raise ConfigError(f"{field} has final, back_in_s and lifetime_s: {name!r:.60}")
    final = given.get("final", False)
    if not isinstance(final, bool):
        raise ConfigError(f"{field}.final is true or false: {final!r:.60}")
    lifetime, back = given.get("lifetime_s"), given.get("back_in_s")
    return Hints(
        final,
        -1.0 if back is None else _seconds(back, f"{field}.back_in_s"),
        -1.0 if lifetime is None else _seconds(lifetime, f"{field}.lifetime_s"),
    )


def _seconds(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_S:
        raise ConfigError(f"{field} is a number of seconds from 0 to {MOST_S:.0f}: {value!r:.60}")
    return float(value)


def lifetime_s(text: Any) -> float | None:
    """The seconds of a lifetime as services write it, "5m", "1h" or "3600s"; None for what is none."""
    if not isinstance(text, str) or not _LIFETIME.fullmatch(text):
        return None
    return min(float(text[:-1]) * _UNITS[text[-1]], MOST_S)


def written(hints: Hints) -> dict[str, Any]:
    """`hints` as an object that `hints_of` reads."""
    said = {name: value for name, value in zip(("back_in_s", "lifetime_s"), hints[1:], strict=True) if value >= 0}
    return {**({"final": True} if hints.final else {}), **said}
