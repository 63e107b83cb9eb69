"""Loading weights and giving memory back are for an idle scheduler: they wait for it, and later requests for them.

SGLang's HTTP process lets an update through when no client waits for an answer. The request of one that hung up may
still be in the scheduler then, and a second HTTP worker knows nothing of the first one's clients; SGLang ends the
scheduler on an assertion, after the weights have changed under whoever runs. This acts in the scheduler.

In a pause no request ends: an update that would empty the cache is refused there if requests have begun.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_hybrid.engine.cache.clock import is_request
from sglang_hybrid.engine.frontend.settings import settings

logger = logging.getLogger(__name__)

_IN_THE_MIDDLE = (
    "requests are paused in the middle of their answers, and what is cached for them cannot be flushed; pause with "
    "mode retract or abort, or update with flush_cache false"
)


class Gate:
    """What one scheduler received and has not handled yet, in order."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def admit(self, received: list[Any], idle: bool) -> list[Any]:
        """What to handle now. Nothing that needs an idle scheduler stands behind a request in it."""
        ready: list[Any] = []
        pending, self._held = [*self._held, *received], []
        for message in pending:
            if self._held and (is_request(message) or _needs_idle(message)):
                self._held.append(message)
            elif _needs_idle(message) and not idle:
                logger.info("%s waits until the requests that run have ended", type(message).__name__)
                self._held.append(message)
            else:
                idle = idle and not is_request(message)
                ready.append(message)
                if self._held and _is_abort(message):
                    self._held.append(message)  # for requests that wait here
        return ready

    def give(self) -> list[Any]:
        """What is held, and then is not any more."""
        held, self._held = self._held, []
        return held

    def __len__(self) -> int:
        return len(self._held)


_gate = Gate()
"""A process has one scheduler."""


def hold(scheduler: Any, received: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A scheduler is about to handle what it received."""
    if not len(_gate) and not any(map(_needs_idle, received)):
        return None
    idle = _is_idle(scheduler)
    if scheduler._engine_paused and not idle:
        received = [message for message in (*_gate.give(), *received) if not _refuse(scheduler, message)]
    return (scheduler, _gate.admit(received, idle)), {}


def _is_idle(scheduler: Any) -> bool:
    """Whether SGLang would empty its cache now. In a pause it does not mind requests that wait to begin."""
    if scheduler._engine_paused:
        try:
            return bool(scheduler.is_fully_idle(ignore_waiting=True))
        except TypeError:  # 0.5.17 minds them
            pass
    return bool(scheduler.is_fully_idle())


def _refuse(scheduler: Any, message: Any) -> bool:
    """Answer `message` if it is an update that would wait here: whoever sent it may end the pause only then."""
    name = type(message).__name__
    if not name.startswith("UpdateWeight") or not _needs_idle(message):
        return False
    from sglang.srt.managers import io_struct

    answer = getattr(io_struct, name.removesuffix("Input") + "Output")(success=False, message=_IN_THE_MIDDLE)
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, message)
    return True


def _needs_idle(message: Any) -> bool:
    name = type(message).__name__
    if name == "ReleaseMemoryOccupationReqInput":
        return settings().memory != "elastic" or _more_than_kv(message.tags)  # KV and states are given back under load
    return name.startswith("UpdateWeight") and bool(getattr(message, "flush_cache", False))


def _more_than_kv(tags: list[str] | None) -> bool:
    """Whether SGLang, and not elastic memory alone, has to release something; without tags that is KV and states."""
    return bool({*(tags or ())} - {"kv_cache"})


def _is_abort(message: Any) -> bool:
    return type(message).__name__ == "AbortReq"
