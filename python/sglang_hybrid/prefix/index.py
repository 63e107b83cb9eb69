"""Where a prompt could resume on every worker of a cluster, from the events that the workers publish.

A worker's events say which blocks of KV it holds and behind which blocks it holds a state (docs/events.md). Blocks are
named by hashes that depend on all tokens before them, so a set of names per worker is all there is to keep. A hybrid
model resumes at the deepest state whose blocks are all there; KV beyond it saves nothing.

What is lost, late or doubled on the way makes a prediction wrong. That costs time on the wrong worker and nothing else.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens

STATE_KIND = "mamba"
"""`kv_cache_spec_kind` of a state's events, as other engines and routers write it; others, or none, are KV."""

_SALT = b"sglang-cache-salt-v1\0"


def block_hashes(tokens: Tokens | list[int], page_tokens: int, salt: str | None = None) -> list[int]:
    """The names of the whole pages of `tokens`, as SGLang's events have them: 64 bits of a chain of SHA-256.

    `salt` is the request's `cache_salt`. Raises ConfigError for pages of no tokens.
    """
    if page_tokens <= 0:
        raise ConfigError(f"a page has one token or more: {page_tokens}")
    packed = np.ascontiguousarray(as_tokens(tokens), dtype="<u4").tobytes()
    digest = b"" if salt is None else sha256(_SALT + salt.encode()).digest()
    names, size = [], 4 * page_tokens
    for start in range(0, len(packed) - size + 1, size):
        digest = sha256(digest + packed[start : start + size]).digest()
        names.append(int.from_bytes(digest[:8], "big", signed=True))
    return names


class Reach(NamedTuple):
    """How far a worker gets with a prompt: it resumes at `resume_tokens`, and has KV of `kv_tokens`."""

    resume_tokens: int
    kv_tokens: int


class _Worker:
    """Names of what one worker holds, by medium: what leaves one may still be in another."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {}
        self.states: dict[str, set[int]] = {}


class RestartIndex:
    """What the workers hold, by their names; `page_tokens` is the page size of all of them."""

    def __init__(self, page_tokens: int) -> None:
        if page_tokens <= 0:
            raise ConfigError(f"a page has one token or more: {page_tokens}")
        self.page_tokens = page_tokens
        self._workers: dict[str, _Worker] = {}

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._workers)

    def join(self, worker: str) -> None:
        """`worker` is there, and holds nothing that is known of."""
        self._workers[worker] = _Worker()

    def leave(self, worker: str) -> None:
        """`worker` is gone, or events of it were lost; an unknown one is ignored."""
        self._workers.pop(worker, None)

    def apply(self, worker: str, event: Mapping[str, Any]) -> bool:
        """Learn from one event of `worker`, a map as it came over the wire; whether it was one that is known.

        Events of other kinds and versions, and damaged ones, change nothing.
        """
        held = self._workers.setdefault(worker, _Worker())
        kind = event.get("type")
        if kind == "AllBlocksCleared":
            self._workers[worker] = _Worker()
            return True
        if kind not in ("BlockStored", "BlockRemoved"):
            return False
        names, medium = event.get("block_hashes"), event.get("medium")
        if not isinstance(names, list) or not all(type(name) is int for name in names):
            return False
        by_medium = held.states if event.get("kv_cache_spec_kind") == STATE_KIND else held.blocks
        known = by_medium.setdefault(medium if isinstance(medium, str) else "GPU", set())
        if kind == "BlockStored":
            known.update(names)
        else:
            known.difference_update(names)
        return True

    def reach(self, worker: str, names: Iterable[int]) -> Reach:
        """How far `worker` gets with the pages called `names`, which are those before the last token of a prompt."""
        held = self._workers.get(worker)
        resume = kv = 0
        for name in names if held is not None else ():
            assert held is not None
            if not any(name in blocks for blocks in held.blocks.values()):
                break
            kv += self.page_tokens
            if any(name in states for states in held.states.values()):
                resume = kv
        return Reach(resume, kv)

    def reaches(self, tokens: Tokens | list[int], salt: str | None = None) -> dict[str, Reach]:
        """How far every worker gets with the prompt `tokens`, whose last token is always computed."""
        names = block_hashes(as_tokens(tokens)[:-1], self.page_tokens, salt)
        return {worker: self.reach(worker, names) for worker in self._workers}
