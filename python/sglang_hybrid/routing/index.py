"""Where a prompt could resume on every worker of a cluster, from the events that the workers publish.

A worker's events say which blocks of KV it holds and behind which blocks it holds a state (docs/events.md). Blocks are
named by hashes that depend on all tokens before them, so the workers that hold a name are all there is to keep. A
hybrid model resumes at the deepest state whose blocks are all there; KV beyond it saves nothing.

What is lost, late or doubled on the way makes a prediction wrong. That costs time on the wrong worker and nothing else.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens

STATE_KIND = "mamba"
"""`kv_cache_spec_kind` of a state's events, as other engines and routers write it; others, or none, are KV."""

SNAPSHOT = (2**64 - 2).to_bytes(8, "big")
"""What a replay socket is asked for to have everything told once more: a sequence number that no batch has, so that
servers without our overlay send nothing."""

_SALT = b"sglang-cache-salt-v1\0"


def block_hashes(tokens: Tokens | list[int], page_tokens: int, salt: str | None = None) -> list[int]:
    """The names of the whole pages of `tokens`, as SGLang's events have them: 64 bits of a chain of SHA-256.

    `salt` is the request's `cache_salt`. Raises ConfigError for pages of no tokens.
    """
    if page_tokens <= 0:
        raise ConfigError(f"a page has one token or more: {page_tokens}")
    packed = np.ascontiguousarray(as_tokens(tokens), dtype="<u4").tobytes()
    before = b"" if salt is None else sha256(_SALT + salt.encode()).digest()
    size = 4 * page_tokens
    whole = packed[: len(packed) // size * size]
    return [int.from_bytes(digest[:8], "big", signed=True) for digest in chain(whole, size, before)]


def chain(packed: bytes, size: int, digest: bytes = b"") -> Iterator[bytes]:
    """SHA-256 of every `size` bytes of `packed`, and of what is left, each behind the digest before it."""
    for start in range(0, len(packed), size):
        digest = sha256(digest + packed[start : start + size]).digest()
        yield digest


class Reach(NamedTuple):
    """How far a worker gets with a prompt: it resumes at `resume_tokens`, and has KV of `kv_tokens`."""

    resume_tokens: int
    kv_tokens: int


NOTHING = Reach(0, 0)

_Holders = dict[int, int]  # name -> the workers that hold it, a bit each


class RestartIndex:
    """What the workers hold, by their names; `page_tokens` is the page size of all of them."""

    def __init__(self, page_tokens: int) -> None:
        if page_tokens <= 0:
            raise ConfigError(f"a page has one token or more: {page_tokens}")
        self.page_tokens = page_tokens
        self._bits: dict[str, int] = {}
        self._blocks: dict[str, _Holders] = {}  # by medium: what leaves one may still be in another
        self._states: dict[str, _Holders] = {}

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._bits)

    def join(self, worker: str) -> None:
        """`worker` is there, and holds nothing that is known of."""
        self._forget(self._bit(worker))

    def leave(self, worker: str) -> None:
        """`worker` is gone, or events of it were lost; an unknown one is ignored."""
        if worker in self._bits:
            self._forget(self._bits.pop(worker))

    def apply(self, worker: str, event: Mapping[str, Any]) -> bool:
        """Learn from one event of `worker`, a map as it came over the wire; whether it was one that is known.

        Events of other kinds and versions, and damaged ones, change nothing.
        """
        bit = self._bit(worker)
        kind = event.get("type")
        if kind == "AllBlocksCleared":
            self._forget(bit)
            return True
        if kind not in ("BlockStored", "BlockRemoved"):
            return False
        names, medium = event.get("block_hashes"), event.get("medium")
        if not isinstance(names, list) or not all(type(name) is int for name in names):
            return False
        by_medium = self._states if event.get("kv_cache_spec_kind") == STATE_KIND else self._blocks
        holders = by_medium.setdefault(medium if isinstance(medium, str) else "GPU", {})
        if kind == "BlockStored":
            for name in names:
                holders[name] = holders.get(name, 0) | bit
        else:
            for name in names:
                _drop(holders, name, bit)
        return True

    def reaches(self, tokens: Tokens | list[int], salt: str | None = None) -> dict[str, Reach]:
        """How far every worker gets with the prompt `tokens`, whose last token is always computed."""
        return self.reaches_of(block_hashes(as_tokens(tokens)[:-1], self.page_tokens, salt))

    def reaches_of(self, names: Sequence[int]) -> dict[str, Reach]:
        """The same for the pages called `names`, which are those before the last token of a prompt."""
        kv, resume = dict.fromkeys(self._bits.values(), 0), dict.fromkeys(self._bits.values(), 0)
        able, end = sum(self._bits.values()), 0
        saved: list[tuple[int, int]] = []  # pages, and the workers that have a state behind so many
        for pages, name in enumerate(names, 1):
            left = able & ~_holders(self._blocks.values(), name)
            if left:
                for bit in _each(left):
                    kv[bit] = pages - 1
                able &= ~left
                if not able:
                    break
            end = pages
            at = able & _holders(self._states.values(), name)
            if at:
                saved.append((pages, at))
        for bit in _each(able):
            kv[bit] = end
        open_ = sum(self._bits.values())
        for pages, at in reversed(saved):
            for bit in _each(at & open_):
                resume[bit] = pages
            open_ &= ~at
        size = self.page_tokens
        return {worker: Reach(resume[bit] * size, kv[bit] * size) for worker, bit in self._bits.items()}

    def _bit(self, worker: str) -> int:
        bit = self._bits.get(worker)
        if bit is None:
            taken, bit = sum(self._bits.values()), 1
            while taken & bit:
                bit <<= 1
            self._bits[worker] = bit
        return bit

    def _forget(self, bit: int) -> None:
        for by_medium in (self._blocks, self._states):
            for holders in by_medium.values():
                for name in [name for name, held in holders.items() if held & bit]:
                    _drop(holders, name, bit)


def _drop(holders: _Holders, name: int, bit: int) -> None:
    left = holders.get(name, 0) & ~bit
    if left:
        holders[name] = left
    else:
        holders.pop(name, None)


def _holders(media: Iterable[_Holders], name: int) -> int:
    held = 0
    for holders in media:
        held |= holders.get(name, 0)
    return held


def _each(bits: int) -> Iterator[int]:
    while bits:
        yield bits & -bits
        bits &= bits - 1
