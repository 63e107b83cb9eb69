"""What a request or another server says that would end a scheduler of a pair, or stop it for everybody.

A router of ours says none of it. Others may: a proxy that sends a request twice, a client that reaches a server itself,
a server that was started again with other settings.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from http import HTTPStatus
from typing import Any
from weakref import finalize

from sglang_hybrid.engine.pairs import connections

MOST_ROOM = 2**63 - 1
LONGEST_HOST = 255

QUICK_S = 0.25
"""For a server that prefills to say what it is: if it takes longer, the scheduler goes on with its other requests."""

logger = logging.getLogger(__name__)


def admit(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a request's way into the first queue of a scheduler that prefills or decodes.

    One that comes back after it was retracted is in its room already.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, prepare_abort

    fake = FAKE_BOOTSTRAP_HOST if queue.transfer_backend.value != "fake" else req.bootstrap_host
    again = kwargs.get("is_retracted") or kwargs.get("is_rebootstrap") or (args and args[0] is True)
    if again or req.bootstrap_host == fake:
        return original(queue, req, *args, **kwargs)
    manager = queue.kv_manager
    rooms: set[int] = manager.__dict__.setdefault("sglang_hybrid_rooms", set())
    _forget(manager, rooms)
    connections.forget_gone(manager)
    why = _refusal(queue, req, rooms)
    if why is None:
        result = original(queue, req, *args, **kwargs)
        rooms.add(req.bootstrap_room)
        leaving = finalize(req, _leave, manager, rooms, req.bootstrap_room, getattr(req, "disagg_kv_sender", None))
        leaving.atexit = False
        return result
    logger.warning("request %s is refused: %s", req.rid, why)
    prepare_abort(req, why, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)
    return None


def _leave(manager: Any, rooms: set[int], room: int, sender: Any) -> None:
    """The request is gone. SGLang keeps what it knows of the room of one that was aborted during its prefill."""
    rooms.discard(room)
    if sender is not None:
        sender.clear()
        manager.failure_records.pop(room, None)
        written = getattr(manager, "_staging_outstanding", {})
        if written.get(room, 1) <= 0:  # else the thread that still writes takes it out
            written.pop(room, None)


def _forget(manager: Any, rooms: set[int]) -> None:
    """A server that decodes spoke of a room, and its request did not come here: a time-out later SGLang still knows it,
    and would for ever."""
    infos = getattr(manager, "transfer_infos", None)
    since, before = manager.__dict__.get("sglang_hybrid_strangers", (-math.inf, set()))
    if infos is None or time.monotonic() < since + manager.bootstrap_timeout:
        return
    strangers = {room for room in list(manager.request_status) if room not in rooms}
    for room in strangers & before:
        for table in (manager.request_status, infos, manager.req_to_decode_prefix_len):
            table.pop(room, None)
    manager.sglang_hybrid_strangers = time.monotonic(), strangers


def _refusal(queue: Any, req: Any, rooms: set[int]) -> str | None:
    host, port, room = req.bootstrap_host, req.bootstrap_port, req.bootstrap_room
    if type(room) is not int or not 0 < room <= MOST_ROOM:
        return f"bootstrap_room is a number from 1 to {MOST_ROOM}: {room!r}"
    if not isinstance(host, str) or not 0 < len(host) <= LONGEST_HOST or not host.isprintable() or " " in host:
        return f"bootstrap_host is the address of the server that prefills: {str(host)[:80]!r}"
    if port is not None and not 0 < port < 65536:
        return f"bootstrap_port is from 1 to 65535: {port}"
    if room in rooms:
        return f"another request is in this room; a room is for one request, sent once: bootstrap_room {room}"
    most = int(queue.metadata_buffers.output_top_logprobs_val.shape[1])
    if req.logprob.top_logprobs_num > most:
        return f"a pair hands over at most {most} top log-probabilities of a token: {req.logprob.top_logprobs_num}"
    return None


def meet(original: Callable[..., bool], manager: Any, address: str) -> bool:
    """Around a scheduler's question to a server that prefills what it is; whether the answer is there and fits.

    SGLang waits five seconds for an answer, the whole scheduler with it, and dies of one that does not fit.
    """
    if address in manager.prefill_info_table:
        return True
    asked: dict[str, Future[bool]] = manager.__dict__.setdefault("sglang_hybrid_asked", {})
    if address not in asked:
        asked[address] = answer = Future[bool]()
        threading.Thread(target=_ask, args=(answer, original, manager, address), daemon=True).start()
    answer = asked[address]
    if not wait([answer], timeout=QUICK_S).done:
        return False
    del asked[address]
    error = answer.exception()
    if error is not None:
        logger.error("the server that prefills at %s does not fit, its requests fail: %s", address, error)
        return False
    return answer.result()


def _ask(answer: Future[bool], original: Callable[..., bool], manager: Any, address: str) -> None:
    try:
        answer.set_result(original(manager, address))
    except Exception as error:
        answer.set_exception(error)


def survive(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Around a write to a server that decodes: one that cannot be done has failed, as any other write that fails.

    SGLang's thread ends by an exception, and every later request of the server waits in vain.
    """
    try:
        return original(*args, **kwargs)
    except Exception:
        logger.exception("nothing is handed over to a server that decodes; has it the settings of this one?")
        return -1
