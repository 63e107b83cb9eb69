"""Request ids are names that clients may choose: none may stand for somebody else's request.

A scheduler that is told to abort a request aborts every one whose id begins with that id: a client that calls its
request `a` and hangs up ends a sixteenth of all others, whose ids are hexadecimal. And one that begins like the id of a
health check is dropped while others run.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.limits import given_values, shown


class RequestId(str):
    """An id that begins with itself only. It is pickled as an ordinary text."""

    __slots__ = ()

    def startswith(self, prefix: Any, *_: Any) -> bool:  # type: ignore[override]
        """Whether `prefix` is this id."""
        return self == prefix

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def name(_: None, req: Any, *args: Any, **kwargs: Any) -> None:
    """Give a scheduler's new request an id that no shorter one aborts, except a health check's, known by its prefix."""
    from sglang.srt.managers import io_struct

    # Without pickles SGLang sends plain texts only.
    if isinstance(req.rid, str) and io_struct._USE_PICKLE_IPC and not req.rid.startswith(_health_prefix()):
        req.rid = RequestId(req.rid)


def require_own(obj: Any, path: str) -> None:
    """Raise ConfigError for an id that SGLang takes for a health check's: such a request may never be answered."""
    if path.startswith("/health"):
        return
    for rid in given_values(obj.rid):
        if isinstance(rid, str) and rid.startswith(_health_prefix()):
            raise ConfigError(f"rid does not begin with {_health_prefix()}, which is for health checks: {shown(rid)}")


def _health_prefix() -> str:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return str(HEALTH_CHECK_RID_PREFIX)
