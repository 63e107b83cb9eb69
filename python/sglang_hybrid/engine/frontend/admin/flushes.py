"""A flush is of all replicas, or was none: SGLang tells what one of them said. Runs in the HTTP process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from sglang_hybrid.engine.frontend.segments import parallel
from sglang_hybrid.engine.processes import embedded


async def all_of_them(original: Callable[..., Any], communicator: Any, message: Any) -> Any:
    """AROUND hook of FanOutCommunicator.__call__: the answers of all replicas, to a flush the failures first.

    SGLang takes the first to come. The idle replicas of a busy server answer soonest, and have flushed; the others go
    on serving what is old.
    """
    kind = type(message).__name__
    if kind.startswith(("FlushCache", "UpdateWeight")):
        parallel.forget()
    engine = embedded.of(communicator)
    async with nullcontext() if engine is None else engine.alive():
        answers = await original(communicator, message)
    if kind == "FlushCacheReqInput":
        answers = sorted(answers, key=lambda answer: bool(answer.success))
    return answers
