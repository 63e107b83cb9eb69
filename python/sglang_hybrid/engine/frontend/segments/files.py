"""Memory through which an HTTP process and the ranks of its scheduler hand each other entries."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any
from weakref import finalize

import aiohttp

from sglang_hybrid.engine.segments.exchange import memory_name

_CHUNK = 1 << 20


class Files:
    """Memory that the ranks of this server reach by a path, one for each; it is gone with whoever holds this.

    A path is a number, which the next file gets when this one is closed; so each has a name that no other has.
    """

    def __init__(self, count: int) -> None:
        self._open: list[int] = []
        self._token = secrets.token_hex(8)
        self._finalizer = finalize(self, _close, self._open)
        for rank in range(count):
            self._open.append(os.memfd_create(memory_name(self._token, rank)))

    @property
    def told(self) -> dict[str, Any]:
        """What a question to the scheduler says of them (`Exchange.answer`)."""
        return {"paths": [f"/proc/{os.getpid()}/fd/{each}" for each in self._open], "token": self._token}

    def close(self) -> None:
        """Give the memory back now; whoever may still read it has to be done."""
        self._finalizer()

    async def pieces(self, size: int) -> AsyncIterator[bytes]:
        """The first `size` bytes of each."""
        for each in self._open:
            for start in range(0, size, _CHUNK):
                yield os.pread(each, min(_CHUNK, size - start), start)
                await asyncio.sleep(0)

    async def fill(self, size: int, source: aiohttp.StreamReader) -> None:
        """Read `size` bytes into each; EOFError if there are fewer."""
        for each in self._open:
            left = size
            while left:
                piece = await source.read(min(left, _CHUNK))
                if not piece:
                    raise EOFError(f"a parcel ends early: {left} bytes are missing")
                left -= len(piece)
                while piece:
                    piece = piece[os.write(each, piece) :]


def _close(files: list[int]) -> None:
    for each in files:
        os.close(each)
    files.clear()
