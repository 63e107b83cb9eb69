"""Questions of the HTTP process to its scheduler (`segments.listing`, `segments.exchange`)."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.segments.listing import METHOD

PATH = "/hybrid/segments"


async def ask(manager: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A question to the scheduler (`segments.listing`), and its answer; raises ConfigError if it has none."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    (answer,) = await manager.dumper_control(DumperControlReqInput(method=METHOD, body=body))
    if not answer.success:
        raise ConfigError(answer.error)
    found: dict[str, Any] = answer.response[0]
    return found
