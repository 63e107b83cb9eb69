"""Why a worker could not be reached: its own fault, or the router's."""

from __future__ import annotations

import errno
import logging
import os

import aiohttp

from sglang_hybrid.cluster.mistakes import Seldom

logger = logging.getLogger(__name__)

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_said = Seldom()


def router_is_short(error: BaseException) -> bool:
    """Whether it is the router that has no file, port or memory left, which it logs: the worker is well."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    short = isinstance(cause, OSError) and cause.errno in _SHORTAGES
    if short and _said.due():
        logger.error("the router itself can open no connection (ulimit -n, ports, memory): %s", cause)
    return short


def reason(error: Exception) -> str:
    """Why a worker could not be reached, in words that an operator knows."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"no connection: {os.strerror(number) if number else error.os_error}"
    return "it does not answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
