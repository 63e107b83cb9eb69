"""Loading weights and giving memory back are for an idle scheduler: they wait for it, and later requests for them.

SGLang's HTTP process lets an update through when no client waits for an answer. The request of one that hung up may
still be in the scheduler then, and a second HTTP worker knows nothing of the first one's clients; SGLang ends the
scheduler on an assertion, after the weights have changed under whoever runs. This acts in the scheduler.

In a pause no request ends: an update that would empty the cache is refused there if requests have begun.

Groups of data-parallel attention run different requests with shares of the same layers, and get such a message in the
same step. They handle it in the same step too, the one in which all of them are idle: a group that is idle would change
its share under the requests of the others, or wait in a barrier for ranks that wait for it in a pass.
"""

from __future__ import annotations

import logging
from itertools import takewhile
from typing import Any

from sglang_hybrid.engine.cache import sessions
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

    def could(self, received: list[Any], idle: bool) -> int:
        """How many messages that need an idle scheduler it could handle now: those that no request stands before."""
        if not idle:
            return 0
        before = takewhile(lambda message: not is_request(message), (*self._held, *received))
        return sum(map(_needs_idle, before))

    def admit(self, received: list[Any], most: int) -> list[Any]:
        """What to handle now: at most as many that need an idle scheduler, which is not more than it could."""
        ready: list[Any] = []
        held, self._held = self._held, []
        for place, message in enumerate((*held, *received)):
            if self._held and (is_request(message) or _needs_idle(message)):
                self._held.append(message)
            elif _needs_idle(message) and most < 1:
                if place >= len(held):
                    logger.info("%s waits until the requests that run have ended", type(message).__name__)
                self._held.append(message)
            else:
                most -= _needs_idle(message)
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
    all_idle, most = _least(scheduler, int(idle), _gate.could(received, idle))
    if scheduler._engine_paused and not all_idle:
        received = [message for message in (*_gate.give(), *received) if not _refuse(scheduler, message)]
    return (scheduler, _gate.admit(received, most)), {}


def _least(scheduler: Any, *counts: int) -> list[int]:
    """The least of all ranks that have shares of these layers, for each of `counts`: all come here in the same step."""
    import torch
    from torch.distributed import ReduceOp, all_reduce, get_world_size

    group = scheduler.tp_cpu_group
    if get_world_size(group=group) > 1:
        shared = torch.tensor(counts, dtype=torch.int64)
        all_reduce(shared, op=ReduceOp.MIN, group=group)
        return [int(count) for count in shared]
    return list(counts)


def _is_idle(scheduler: Any) -> bool:
    """Whether SGLang would empty its cache now. In a pause it does not mind requests that wait to begin."""
    if scheduler._engine_paused:
        sessions.let_go(scheduler)
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
