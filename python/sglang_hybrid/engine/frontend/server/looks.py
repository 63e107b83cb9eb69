"""Routers are told which server it is that they look at, and whether it was told to stop.

SGLang takes requests until there is none for a moment, and ends then. Behind a router that sends more it never ends.
Runs in every HTTP process; the name is the launcher's, so that all of them have the same.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from sglang_hybrid.engine.launch.server_name import ENVIRONMENT_KEY
from sglang_hybrid.routing.looks import ALIVE, ENDING, INFO, SERVER

ending = threading.Event()
"""Set once the server is told to stop (`drain.py`)."""


def tell(app: Any, scope: Any, receive: Any, send: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """BEFORE hook of an application that is called: more headers of the pages that routers look at."""
    if scope["type"] != "http" or scope["path"] not in (ALIVE, INFO):
        return None
    told = {SERVER: os.environ.get(ENVIRONMENT_KEY), ENDING: "1" if ending.is_set() else None}
    more = [(name.lower().encode(), value.encode()) for name, value in told.items() if value]

    async def with_more(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return (app, scope, receive, with_more), {}
