"""Memory that `/release_memory_occupation` released: what nobody can do with it is answered. Acts in the scheduler.

Under `--enable-memory-saver` weights, KV or graphs then have addresses without memory behind them. SGLang would run a
request over them, that of a probe too, copy weights from there if they are released again, and end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine.cache.clock import is_request
from sglang_hybrid.engine.frontend.validation.limits import shown

logger = logging.getLogger(__name__)

_MESSAGE = "memory is released, and nothing can be computed; call /resume_memory_occupation for: {}"


def refuse(scheduler: Any, received: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """BEFORE hook of process_input_requests, behind `idle.hold`: 503 for requests, with what brings memory back.

    In a pause they wait, as they do in any other.
    """
    if not scheduler.server_args.enable_memory_saver or not any(map(is_request, received)):
        return None
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    known, kept = set(GPU_MEMORY_ALL_TYPES), []
    gone = known & set(scheduler.weight_updater.offload_tags)  # SGLang notes names there of which it releases nothing
    for message in received:
        name = type(message).__name__
        if name == "ReleaseMemoryOccupationReqInput":
            gone |= known & _tags(message)
        elif name == "ResumeMemoryOccupationReqInput":
            gone -= _tags(message)
        if gone and is_request(message) and not scheduler._engine_paused:
            for each in getattr(message, "batch", None) or [message]:
                _answer(scheduler, each, gone)
        else:
            kept.append(message)
    return (scheduler, kept), {}


def release(original: Callable[..., Any], updater: Any, message: Any) -> Any:
    """AROUND hook of release_memory_occupation: what is released already stays as it is."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    asked, gone = _tags(message), set(updater.offload_tags)
    if asked & gone:  # else the message keeps having no tags, which elastic memory reads
        logger.warning("nothing to release of %s: it is released already", shown(sorted(asked & gone)))
        message.tags = sorted(asked - gone)
    return original(updater, message) if asked - gone else ReleaseMemoryOccupationReqOutput()


def resume(original: Callable[..., Any], updater: Any, message: Any) -> Any:
    """AROUND hook of resume_memory_occupation: what was never released, or is back already, needs no resuming."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    asked, gone = _tags(message), set(updater.offload_tags)
    if asked - gone:
        logger.warning("nothing to resume of %s: it was not released", shown(sorted(asked - gone)))
    message.tags = sorted(asked & gone)
    return original(updater, message) if message.tags else ResumeMemoryOccupationReqOutput()


def _tags(message: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return set(message.tags or GPU_MEMORY_ALL_TYPES)


def _answer(scheduler: Any, request: Any, gone: set[str]) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    said = _MESSAGE.format(", ".join(sorted(gone)))
    reason = {"type": "abort", "status_code": 503, "message": said}
    answer = AbortReq(rid=request.rid, abort_message=said, finished_reason=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
