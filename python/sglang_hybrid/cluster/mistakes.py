"""What a router logs of what its clients do wrong: a line a minute, so that no client fills a disk with it."""

from __future__ import annotations

import logging
import math
import time

from aiohttp.http_exceptions import HttpProcessingError

SAID_S = 60.0


class Seldom:
    """Whether something is said once more: `SAID_S` after the last time."""

    def __init__(self) -> None:
        self._said_s = -math.inf

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._said_s < SAID_S:
            return False
        self._said_s = now
        return True


class _NoHttp(logging.Filter):
    """aiohttp answers what is no HTTP with 400, and logs a traceback of its parser for each."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom, self._count = Seldom(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._count += 1
        if not self._seldom.due():
            return False
        told = next(iter(error.message.splitlines()), "")
        record.msg, record.args = "requests that are no HTTP are answered 400, %d until now: %.80s", (self._count, told)
        record.exc_info = record.exc_text = None
        return True


http_logger = logging.getLogger(f"{__name__}.http")
"""For aiohttp's server."""

http_logger.addFilter(_NoHttp())
