"""Registers every hook with SGLang, and proves that each is in place: SGLang only logs one that failed."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable
from typing import Any

from sglang_hybrid.core.errors import IncompatibleEngine
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.surface.check import exists
from sglang_hybrid.engine.surface.hooks import HOOKS, REPLACED
from sglang_hybrid.engine.surface.rows import full_name

logger = logging.getLogger(__name__)

_required: list[str] = []


def register(features: Iterable[str]) -> list[str]:
    """Register the hooks of all rows whose `when` is one of `features`; returns the targets that `verify` asks for."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    version, asked = compat.engine_version(), set(features)
    targets = []
    wanted = [hook for hook in HOOKS if hook.when in asked and hook.holds(version)]
    around: dict[str, list[Any]] = {}
    for hook in wanted:
        if hook.how == "AROUND":
            around.setdefault(hook.target, []).append(_ours(hook.function))
    for hook in wanted:
        target = full_name(hook.target).replace(":", ".")
        if not hook.required and not exists(hook.target):
            logger.warning("%s is gone: some mistakes of clients are answered with 500", target)
            continue
        function = _ours(hook.function)
        if hook.how == "AROUND":
            function = functools.reduce(_outside, around.pop(hook.target, ()), None)
        if function is not None:
            HookRegistry.register(target, function, HookType[hook.how])
        if hook.required:
            targets.append(target)
    _required.extend(targets)
    return targets


def _outside(inner: Any, outer: Any) -> Any:
    """One AROUND hook of two, the later one outside, as SGLang would nest them: it warns of several at one place."""
    if inner is None:
        return outer

    def both(original: Any, *args: Any, **kwargs: Any) -> Any:
        return outer(functools.partial(inner, original), *args, **kwargs)

    return both


def replace(feature: str) -> None:
    """Give the names of all rows of `feature` our values."""
    version = compat.engine_version()
    for row in REPLACED:
        if row.when == feature and row.holds(version):
            module, _, path = full_name(row.target).partition(":")
            *classes, name = path.split(".")
            holder = functools.reduce(getattr, classes, importlib.import_module(module))
            if not (row.absent and hasattr(holder, name)):
                setattr(holder, name, _ours(row.value))


def verify() -> int:
    """Number of required hooks; raises IncompatibleEngine unless every one is in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if not _required:
        raise IncompatibleEngine(
            "SGLang did not load this package; let SGLANG_PLUGINS name sglang_hybrid where it is set, or run "
            "sglang-hybrid doctor: no plugin was loaded"
        )
    if missing := [target for target in _required if target not in HookRegistry._patched]:
        raise IncompatibleEngine(
            f"SGLang {compat.engine_version()} did not accept a hook this server cannot be right without; "
            f"install sglang=={compat.PRIMARY}: {', '.join(missing)}"
        )
    return len(_required)


def _ours(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"sglang_hybrid.engine.{module}"), attribute)
