"""The port of a server from its start on. It is bound only once the model is loaded, seconds or minutes later.

Of two starts on one port the second would load the model as well, beside the first or out of its memory, and then end.
So a start takes a name in Linux's abstract namespace. That is as wide as the one of ports (a container or the machine),
nobody can connect to it, and it goes with its process however that ends.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from sglang_hybrid.core.errors import ConfigError

_taken: list[socket.socket] = []


def take(host: str, port: int) -> None:
    """Raise ConfigError if there is no such port, a program listens on it, or a server that is starting will."""
    check(host, port)
    release()
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _taken.append(name)
    try:
        name.bind(f"\0sglang-hybrid {host} {port}")
    except OSError as error:
        release()
        if error.errno == errno.EADDRINUSE:  # others: no such names here
            raise ConfigError(
                f"another server is starting on {host}; stop it or pass another --port: {port}"
            ) from error


def release() -> None:
    """Once the port is bound, and in a copy of the process that took it."""
    while _taken:
        with suppress(OSError):
            _taken.pop().close()


def check(host: str, port: int) -> None:
    """Raise ConfigError if there is no such port or another program listens on it."""
    if not 0 < port < 65536:
        raise ConfigError(f"--port must be from 1 to 65535: {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} ({error.strerror}); stop the other server or pass another --port: {port}"
            ) from error
