"""Everything of ours that runs where HTTP requests come in."""

from __future__ import annotations

from sglang_hybrid.engine.frontend import requests, usage, workers


def register() -> list[str]:
    """Register the hooks with SGLang's HookRegistry and return their targets."""
    return [target for part in (workers, requests, usage) for target in part.register()]
