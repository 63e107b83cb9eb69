"""Who waits for requests to end sees that they can: a server that is told to stop in a pause, and a pause that aborts.

SGLang waits too, for requests that nobody lets go on, and for its first one, which nobody answers any more where the
server is told to stop before it. With `--tokenizer-worker-num` the first worker without requests ends the scheduler
under those of the others, which then wait for ever. uvicorn waits for every connection that is open, without end: one
client that reads no more of its answer, or never sends the rest of its request, would keep a server from ending. Runs
in every HTTP process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_hybrid.engine.frontend.server import looks
from sglang_hybrid.engine.processes import stop

logger = logging.getLogger(__name__)

LOOK_S = 1.0
PATIENCE_S = 10.0
"""How long a pause may take to end: it cannot while the one that began it still waits."""

DELIVER_S = 20.0
"""For clients to fetch answers that are done, once a server was told to stop."""

_closed = threading.Event()
_servers: list[Any] = []
"""uvicorn's of this process, once it serves."""


def serve(server: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook of uvicorn's Server.main_loop."""
    _servers.append(server)


def close(*_: Any, **__: Any) -> None:
    """BEFORE hook of uvicorn's Server.shutdown: from here on no connection is taken."""
    _closed.set()


def warm_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """AROUND hook of _wait_and_warmup: the end of a server waits for it, and it for an answer, up to twelve minutes."""
    thread = threading.Thread(target=original, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    while thread.is_alive() and not _closed.wait(LOOK_S / 10):
        pass


async def drain(original: Callable[..., Any], manager: Any) -> Any:
    """AROUND hook of TokenizerManager.sigterm_watchdog, which waits for the signal and for the requests then."""
    while not manager.gracefully_exit:
        await asyncio.sleep(LOOK_S)
    looks.ending.set()
    if manager.is_pause:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        logger.info("told to stop in a pause: it ends, so that requests can")
        try:
            await asyncio.wait_for(manager.continue_generation(ContinueGenerationReqInput()), PATIENCE_S)
        except TimeoutError:
            logger.error("the pause did not end within %.0f s: requests may wait for ever", PATIENCE_S)
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    if isinstance(manager, TokenizerWorker):
        manager._dispatch_to_scheduler = partial(_serve_on, manager._dispatch_to_scheduler)
        if hasattr(manager, "set_server_stop_hook"):  # not in 0.5.17, which ends the process
            manager.set_server_stop_hook(_stop_serving)
    stop.asked.set(True)  # in this task alone: what else ends the server meanwhile was not asked for
    done = await original(manager)
    asyncio.get_running_loop().call_later(DELIVER_S, _hang_up)
    return done


def _hang_up() -> None:
    """Cut off who is still connected: all requests have ended, so these do not read, or do not send."""
    for server in _servers:
        if left := list(server.server_state.connections):
            logger.warning("%d clients still connected %.0f s after the last answer: cut off", len(left), DELIVER_S)
        for connection in left:
            connection.transport.abort()


def _stop_serving() -> None:
    """End this HTTP worker as uvicorn would; SGLang leaves the event loop instead, and uvicorn logs a traceback."""
    for server in _servers:
        server.should_exit = True


def _serve_on(send: Callable[[Any], Any], message: Any) -> Any:
    """Send what a worker that ends tells the scheduler, but to end: the first process sees to it, after all workers."""
    from sglang.srt.managers.io_struct import ShutdownReq

    return None if isinstance(message, ShutdownReq) else send(message)


async def pause(original: Callable[..., Any], manager: Any, message: Any) -> Any:
    """AROUND hook of TokenizerManager.pause_generation: who is paused in the middle is retracted before it is aborted.

    An abort in the middle of an answer takes effect with the next pass. In a pause there is none, SGLang waits for it,
    and the end of the pause waits for SGLang.
    """
    if message.mode == "abort" and manager.is_pause:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await original(manager, PauseGenerationReqInput(mode="retract"))
    return await original(manager, message)
