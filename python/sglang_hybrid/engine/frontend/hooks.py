"""Registers everything of this package."""

from __future__ import annotations

from sglang_hybrid.engine.frontend import (
    access,
    bodies,
    endpoints,
    grammars,
    idle,
    ids,
    requests,
    stop_patterns,
    usage,
    workers,
)


def register() -> list[str]:
    """Register the hooks with SGLang's HookRegistry and return their targets."""
    parts = (workers, access, bodies, endpoints, grammars, idle, ids, requests, stop_patterns, usage)
    return [target for part in parts for target in part.register()]
