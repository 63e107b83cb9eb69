"""`--tokenizer-worker-num`: SGLang starts HTTP workers that load no plugin; these would serve without our hooks.

Every worker begins with the arguments that the first process leaves in shared memory, as a pickle. A `Passport` goes
with them: whoever unpickles it loads the plugins and proves the hooks, or fails before it serves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine.frontend.server import identity

KEY = "sglang_hybrid_hooks"
"""Where the passport lies in the scheduler's information that each worker gets; afterwards, the number of hooks."""

logger = logging.getLogger("sglang.srt.entrypoints.http_server")
"""The one logger that speaks in a worker before its settings have arrived."""


class Passport:
    """Pickles to a call of `enter`, with the path of the board of `identity.py`."""

    def __init__(self, board: str) -> None:
        self._board = board

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return enter, (self._board,)


def leave(port_args: Any, server_args: Any, scheduler_info: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Prove the hooks of this process, then send the passport along with the arguments."""
    from sglang_hybrid.engine.surface import registration

    registration.verify()
    return (port_args, server_args, {**scheduler_info, KEY: Passport(identity.make())}), {}


def enter(board: str) -> int:
    """In a worker that takes the arguments: apply the hooks, prove them, return their number.

    Raises IncompatibleEngine, which ends the worker before it opens its port.
    """
    from sglang.srt.plugins import load_plugins

    from sglang_hybrid.engine.processes import stop
    from sglang_hybrid.engine.surface import registration

    stop.repeat_missed()
    load_plugins()
    proved = registration.verify()
    identity.path = board
    logger.info("sglang-hybrid is active in HTTP worker %d: %d hooks", os.getpid(), proved)
    return proved
