"""Questions of the HTTP process to its scheduler (`segments.listing`, `segments.exchange`)."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.segments.listing import ALL, ERROR, METHOD

PATH = "/hybrid/segments"
_ASKING = "_hybrid_segment_questions"
_TOGETHER = 32


async def ask(manager: Any, body: dict[str, Any], refers: Any = None) -> dict[str, Any]:
    """A question to the scheduler (`segments.listing`), and its answer; raises ConfigError if it has none.

    What the question `refers` to lives until the scheduler has answered, even if who asked has left.
    """
    asking = getattr(manager, _ASKING, None)
    if asking is None:
        asking = _Asking(manager)
        setattr(manager, _ASKING, asking)
    answer: dict[str, Any] = await asking.add(body, refers)
    return answer


@dataclass(frozen=True, slots=True)
class _Question:
    body: dict[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    refers: Any


class _Asking:
    """The questions to one scheduler, asked one after the other by a task of their own.

    SGLang takes the next answer for that of the next caller, also where one that left, cancelled, had asked for it:
    from then on each would get the answer to another question. Nobody cancels this task.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._open: deque[_Question] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, body: dict[str, Any], refers: Any) -> asyncio.Future[dict[str, Any]]:
        """The answer to come; whoever cancels it does not want it any more."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._open.append(_Question(body, answer, refers))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return answer

    async def _run(self) -> None:
        try:
            while self._open:
                asked = self._next()
                if asked:
                    found = await self._put([question.body for question in asked])
                    for question, answer in zip(asked, found, strict=True):
                        _settle(question.answer, answer)
        finally:
            self._open.clear()  # the loop ends, and nobody waits

    def _next(self) -> list[_Question]:
        """The next question, with those of its kind behind it if they cost the scheduler little: it has one message of
        ours a round. Nobody is asked for who left."""
        asked: list[_Question] = []
        while self._open and len(asked) < _TOGETHER:
            if asked and not (_is_light(asked[-1]) and _is_light(self._open[0])):
                break
            question = self._open.popleft()
            if not question.answer.done():
                asked.append(question)
        return asked

    async def _put(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any] | Exception]:
        """The scheduler's answer to each, or why there is none. An error is not raised here, or it would hold what it
        is about for as long as somebody has it."""
        from sglang.srt.managers.io_struct import DumperControlReqInput

        body = bodies[0] if len(bodies) == 1 else {ALL: bodies}
        try:
            (answer,) = await self._manager.dumper_control(DumperControlReqInput(method=METHOD, body=body))
        except Exception as error:
            return [error.with_traceback(None)] * len(bodies)
        if not answer.success:
            return [ConfigError(answer.error)] * len(bodies)
        return [ConfigError(said[ERROR]) if ERROR in said else said for said in answer.response]


def _is_light(question: _Question) -> bool:
    return "cold" in question.body


def _settle(answer: asyncio.Future[dict[str, Any]], found: dict[str, Any] | Exception) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)
