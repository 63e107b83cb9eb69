"""What an administrator asks for that cannot be is answered; SGLang's scheduler would end on it. Runs there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine.frontend.limits import shown

logger = logging.getLogger(__name__)


def resume(original: Callable[..., Any], updater: Any, message: Any) -> Any:
    """AROUND hook of resume_memory_occupation: what was never released, or is back already, needs no resuming."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    asked = list(dict.fromkeys(message.tags or GPU_MEMORY_ALL_TYPES))
    released = [tag for tag in asked if tag in updater.offload_tags]
    if len(released) < len(asked):
        logger.warning("nothing to resume of %s: it was not released", shown(sorted({*asked} - {*released})))
    if not released:
        return ResumeMemoryOccupationReqOutput()
    message.tags = released
    return original(updater, message)


def send_weights(original: Callable[..., Any], worker: Any, message: Any) -> Any:
    """AROUND hook of send_weights_to_remote_instance: success and message, a group that nobody made included."""
    try:
        return original(worker, message)
    except KeyError as error:
        return (
            False,
            f"call /init_weights_send_group_for_remote_instance first; there is no group {shown(error.args[0])}",
        )
