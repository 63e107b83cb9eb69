"""Our settings in an HTTP process: the launcher's own, or those it passed on to a worker."""

from __future__ import annotations

import functools
import os

from sglang_hybrid.core.config import ENVIRONMENT_KEY, HybridConfig


@functools.cache
def settings() -> HybridConfig:
    """The configuration this server was started with; read at the first request, when the launcher has set it."""
    return HybridConfig.from_json(os.environ.get(ENVIRONMENT_KEY, "{}"))
