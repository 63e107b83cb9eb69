"""Request ids are names that clients may choose: none may stand for somebody else's request.

A scheduler that is told to abort a request aborts every one whose id begins with that id: a client that calls its
request `a` and hangs up ends a sixteenth of all others, whose ids are hexadecimal.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from sglang_hybrid.engine.frontend.validation.ids import health_prefix


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

    if isinstance(req.rid, str) and not req.rid.startswith(health_prefix()):
        if not io_struct._USE_PICKLE_IPC:
            _encode_ids()
        req.rid = RequestId(req.rid)


@functools.cache
def _encode_ids() -> None:
    """Without pickles (`SGLANG_USE_PICKLE_IPC=0`) SGLang sends plain texts only: its encoder gets to know these."""
    from sglang.srt.managers import io_struct

    others = io_struct.enc_hook
    io_struct._msgpack_encoder = msgspec.msgpack.Encoder(
        enc_hook=lambda value: str(value) if isinstance(value, RequestId) else others(value)
    )
