"""A server that is told to stop while it is paused lets its requests go on first: it waits for them before it ends.

SGLang waits too, for requests that nobody will let go on. Runs in the HTTP process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

LOOK_S = 1.0
PATIENCE_S = 10.0
"""How long a pause may take to end: it cannot while the one that began it still waits."""


async def drain(original: Callable[..., Any], manager: Any) -> Any:
    """AROUND hook of TokenizerManager.sigterm_watchdog, which waits for the signal and for the requests then."""
    while not manager.gracefully_exit:
        await asyncio.sleep(LOOK_S)
    if manager.is_pause:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        logger.info("told to stop in a pause: it ends, so that requests can")
        try:
            await asyncio.wait_for(manager.continue_generation(ContinueGenerationReqInput()), PATIENCE_S)
        except TimeoutError:
            logger.error("the pause did not end within %.0f s: requests may wait for ever", PATIENCE_S)
    return await original(manager)
