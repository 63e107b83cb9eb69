"""Requests that are aborted while something is prepared for them, before the scheduler knows them.

SGLang tells the scheduler of an abort once. One that does not know the request yet forgets it, and computes the request
in full later; so it is told again as soon as it has the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_LOOK_S, _STEP_S = 0.1, 0.01
_telling: set[asyncio.Task[None]] = set()
_preparing: dict[asyncio.Task[None], Any] = {}
"""By its preparation, what SGLang keeps of each request that something is prepared for."""


def note(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE hook of TokenizerManager.abort_request: SGLang marks the one that it aborts, and none if it aborts all."""
    if abort_all:
        for state in filter(None, _preparing.values()):
            state.abort_sent = True


async def unless_aborted(manager: Any, rid: str, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` for the request `rid`, and no more of it once that is aborted; raises what `work` raises."""
    state = manager.rid_to_state.get(rid)
    task = asyncio.create_task(work)
    _preparing[task] = state
    try:
        while not task.done() and not _aborted(manager, rid, state):
            await asyncio.wait({task}, timeout=_LOOK_S)
    finally:
        del _preparing[task]
        task.cancel()
    await asyncio.wait({task})
    if _aborted(manager, rid, state):
        telling = asyncio.create_task(_tell(manager, rid, state))
        _telling.add(telling)
        telling.add_done_callback(_telling.discard)
    if not task.cancelled():
        task.result()


def _aborted(manager: Any, rid: str, state: Any) -> bool:
    return state is not None and (manager.rid_to_state.get(rid) is not state or getattr(state, "abort_sent", False))


async def _tell(manager: Any, rid: str, state: Any) -> None:
    """Abort `rid` anew once the scheduler has it, unless it is gone by then."""
    await asyncio.sleep(0)
    while manager.rid_to_state.get(rid) is state and not getattr(state, "dispatched", True):
        await asyncio.sleep(_STEP_S)
    if manager.rid_to_state.get(rid) is state and not state.finished:
        state.abort_sent = False
        manager.abort_request(rid)
