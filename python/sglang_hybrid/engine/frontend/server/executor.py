"""Threads of the HTTP process that know whose request they work for.

SGLang makes prompts of chats in the event loop's executor (0.5.23), whose threads do not see the loop's context
variables: what a request marked would be lost there.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class ContextExecutor(ThreadPoolExecutor):
    """Runs each call in the context of whoever gives it, as `asyncio.to_thread` does."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(contextvars.copy_context().run, call, *args, **kwargs)


def install(app: Any, scope: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook of an application that is called: once, when its server starts, give the loop such an executor."""
    if scope["type"] == "lifespan":
        asyncio.get_running_loop().set_default_executor(ContextExecutor(thread_name_prefix="asyncio"))
