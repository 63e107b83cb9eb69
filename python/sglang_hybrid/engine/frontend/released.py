"""Requests while memory is released: 503, with what brings it back. Acts in the scheduler.

After `/release_memory_occupation` under `--enable-memory-saver` weights, KV or graphs have addresses without memory
behind them. SGLang would run a request over them, that of a probe too, and the scheduler would end. In a pause requests
wait as they do in any other.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache.clock import is_request

_MESSAGE = "memory is released, and nothing can be computed; call /resume_memory_occupation for: {}"


def refuse(scheduler: Any, received: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """BEFORE hook of process_input_requests; runs after `idle.hold`, on what is handled now."""
    if not scheduler.server_args.enable_memory_saver or not any(map(is_request, received)):
        return None
    gone, kept = set(scheduler.weight_updater.offload_tags), []
    for message in received:
        name = type(message).__name__
        if name == "ReleaseMemoryOccupationReqInput":
            gone |= _tags(message)
        elif name == "ResumeMemoryOccupationReqInput":
            gone -= _tags(message)
        if gone and is_request(message) and not scheduler._engine_paused:
            for each in getattr(message, "batch", None) or [message]:
                _answer(scheduler, each, gone)
        else:
            kept.append(message)
    return (scheduler, kept), {}


def _tags(message: Any) -> set[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return set(message.tags or GPU_MEMORY_ALL_TYPES)


def _answer(scheduler: Any, request: Any, gone: set[str]) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    said = _MESSAGE.format(", ".join(sorted(gone)))
    reason = {"type": "abort", "status_code": 503, "message": said}
    answer = AbortReq(rid=request.rid, abort_message=said, finished_reason=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
