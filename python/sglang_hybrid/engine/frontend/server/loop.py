"""The event loop that answers arrive in: that of the first request, for good."""

from __future__ import annotations

import asyncio
from typing import Any


def require_same(manager: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook of `TokenizerManager.auto_create_handle_loop`: raise RuntimeError in another event loop.

    SGLang reads answers in the first one only. A second `asyncio.run` would wait for ever, and a process that waits
    there does not even end when its scheduler does.
    """
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        return
    if manager.event_loop not in (None, here):
        raise RuntimeError(
            "an engine answers in the event loop of its first request; put all calls into one asyncio.run, or use "
            "engine.loop.run_until_complete, as engine.generate does"
        )
