"""Environment variables that a start sets where the user set none.

One process may start several engines, one after the other: what the first set is not the user's word to the second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_set: dict[str, str] = {}


def is_on(name: str) -> bool:
    """Whether somebody switched `name` on, in one of SGLang's words for it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y")


def forget() -> None:
    """Before a start: take back what an earlier one set, unless somebody has changed it since."""
    for name, value in _set.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _set.clear()


def default(values: Mapping[str, str]) -> None:
    """Set those of `values` that the user did not."""
    for name, value in values.items():
        if name not in os.environ:
            os.environ[name] = _set[name] = value
