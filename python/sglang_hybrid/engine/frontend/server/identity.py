"""`--tokenizer-worker-num`: after an update of weights every HTTP worker says which model and weights it serves.

SGLang tells the worker that was asked for the update alone. Of two, half of the calls of `/model_info` and `/v1/models`
named the old weights for good. What the worker records is put on a board, a file in memory that the first process
keeps open, before the update is answered; each worker reads it before it serves a request.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_OWNED, _CONFIGURED = ("model_path", "served_model_name"), ("load_format", "weight_version")
"""What SGLang records in its manager, and in its configuration."""

_MOST = 1 << 20
"""Bytes of the board that are read."""


class Board:
    """The board at `path` as one HTTP worker has it; `manager` is SGLang's there. Raises OSError if there is none."""

    def __init__(self, path: str, manager: Any) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._read = b""
        self._manager, self._known = manager, _identity(manager)

    def adopt(self) -> None:
        """Let this worker say what was written last."""
        with self._locked(fcntl.LOCK_SH):
            read = os.pread(self._file, _MOST, 0)
        if read == self._read:
            return
        self._read, told = read, json.loads(read)
        for name in _OWNED:
            setattr(self._manager, name, told[name])
        self._manager.record_config_updates("hybrid.identity", **{name: told[name] for name in _CONFIGURED})
        self._known = told

    def publish(self) -> None:
        """Write what this worker says, if an update changed it here."""
        if (now := _identity(self._manager)) == self._known:
            return
        self._read, self._known = json.dumps(now, default=str).encode(), now
        with self._locked(fcntl.LOCK_EX):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, self._read, 0)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        fcntl.flock(self._file, how)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def make() -> str:
    """A new board, which lasts as long as this process; the path under which others open it."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('sglang-hybrid-identity')}"


path = ""
"""Of the board, in an HTTP worker; it comes with the worker's arguments."""

_board: Board | None = None


def join(result: Any, manager: Any, *_: Any, **__: Any) -> Any:
    """AFTER hook of TokenizerWorker.__init__. Where there is no board SGLang's answers stay."""
    global _board
    try:
        _board = Board(path, manager)
    except OSError as error:
        logger.warning("after an update of weights this HTTP worker may name the old ones at /model_info: %s", error)
    return result


@contextmanager
def shared() -> Iterator[None]:
    """While a request is served: its worker knows what others recorded, and the others what this request changes."""
    if _board is None:
        yield
        return
    _board.adopt()
    try:
        yield
    finally:
        _board.publish()


def _identity(manager: Any) -> dict[str, Any]:
    return {name: manager.config_value(name) for name in (*_OWNED, *_CONFIGURED)}
