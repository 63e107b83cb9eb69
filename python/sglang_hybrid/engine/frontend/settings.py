"""Our settings in an HTTP process: the launcher's own, or those it passed on to a worker."""

from __future__ import annotations

import functools

from sglang_hybrid.core.config import HybridConfig


@functools.cache
def settings() -> HybridConfig:
    """The configuration this server was started with; read at the first request, when the launcher has set it."""
    return HybridConfig.from_environment()
