"""Request ids that clients may choose: none that SGLang takes for a health check's, which is dropped beside others."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation.limits import given_values, shown


def require_own(obj: Any, path: str) -> None:
    """Raise ConfigError for an id that SGLang takes for a health check's: such a request may never be answered."""
    if path.startswith("/health"):
        return
    for rid in given_values(obj.rid):
        if isinstance(rid, str) and rid.startswith(health_prefix()):
            raise ConfigError(f"rid does not begin with {health_prefix()}, which is for health checks: {shown(rid)}")


def health_prefix() -> str:
    """How the ids of health checks begin."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return str(HEALTH_CHECK_RID_PREFIX)
