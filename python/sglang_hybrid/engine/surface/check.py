"""What the installed SGLang lacks of what is used of it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from sglang_hybrid.engine.surface.hooks import HOOKS, REPLACED
from sglang_hybrid.engine.surface.rows import IMPORT, SUBCLASS, Hook, Replaced, Use, full_name
from sglang_hybrid.engine.surface.uses import USES


def rows(version: str, when: str = "") -> list[Use | Hook | Replaced]:
    """The rows of what is used with `version` of SGLang if `when` is asked for, by itself."""
    return [row for row in (*USES, *HOOKS, *REPLACED) if row.when == when and row.holds(version)]


def required(version: str, when: str = "") -> list[str]:
    """Targets without which `when` cannot start. Private names are tested; looking them up takes SGLang's sources."""
    kinds = (IMPORT, SUBCLASS)
    needed = (
        row for row in rows(version, when) if (row.kind in kinds if isinstance(row, Use) else isinstance(row, Hook))
    )
    return [row.target for row in needed if not isinstance(row, Hook) or row.required]


def missing(targets: Iterable[str]) -> list[str]:
    """The full names of those `targets` that the installed SGLang does not have."""
    return [full_name(target) for target in targets if not exists(target)]


def exists(target: str) -> bool:
    """Whether the installed SGLang has `target`."""
    try:
        resolve(target)
    except (ImportError, AttributeError):
        return False
    return True


def resolve(target: str) -> Any:
    """What `target` names; raises ImportError or AttributeError."""
    module, _, path = full_name(target).partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(f"{module}.{name}")
            except ImportError:
                raise AttributeError(f"{full_name(target)} is gone") from None
    return found
