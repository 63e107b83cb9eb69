"""A record of every decision of a server, private by default, and its replay: the same questions, the same answers.

One JSON array a line. The first holds what `Decisions` was made with; then, in order of time:

| line | meaning |
| --- | --- |
| `["arrive", request, s, namespace, cached, kv, limit, boundaries, tokens, positions, seen, hints]` | a prefill began |
| `["segments", request, [[start, end, name], ...]]` | what its client marked as segments; equal ones have equal names |
| `["resumed", request, position]` | it resumes at the state the history knows at `position` |
| `["computed", request]` | it is cached; behind `finish`: all of it that ever will be |
| `["finish", request, s, length, tokens of the answer, kept]` | it ended, in mid-prefill if shorter than its prompt |
| `["saved", request, positions]` | states of it are in the cache |
| `["fit", states, tokens, bytes]`, `["flushed"]` | what the cache has to get along with; it was emptied |
| `["put", pool, candidate...]`, `["discard", pool, id]` | what can be evicted |
| `["victim", pool, s, id, alpha]` | what was |
| `["seed", s, namespace, tokens]` | a hot prefix was announced |
| `["full"]` | the log has reached its size |

Tokens are written as chained hashes unless plain ones are asked for: a value depends on all tokens before it and on a
secret of this log, so equal prefixes stay equal, which is all that decisions depend on, and nothing can be read back.
A segment is equal at any place, so it has a name, hashed with the same secret.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np

from sglang_hybrid.core.arrays import mixed
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import Places
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.guard.shadow import UNLIMITED
from sglang_hybrid.prefix.log_schema import BUDGET, COSTS, LINE_BYTES, SHAPE
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.request import NO_LIMIT, Request
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.tokens import Tokens

logger = logging.getLogger(__name__)

VERSION = 9
READABLE = (7, 8, VERSION)
"""Versions that are read: 7 lacks segments, and both lack `pass_states`."""
_BLOCK = 4096  # bytes: more than any file has room for on a full disk
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def chained(tokens: Tokens, secret: int) -> Tokens:
    """A 30-bit value per token that depends on it, on everything before it, and on `secret`; shape as `tokens`."""
    with np.errstate(over="ignore"):
        index = np.arange(1, tokens.size + 1, dtype=np.uint64)
        words = mixed(tokens.astype(np.uint64) * _GOLDEN ^ mixed(index * _GOLDEN + np.uint64(secret)))
        values: Tokens = (mixed(np.cumsum(words, dtype=np.uint64)) >> np.uint64(34)).astype(np.int32)
    return values


def check_writable(path: Path) -> None:
    """Raise ConfigError unless a log at `path` can be written now; a file that is there keeps its content."""
    try:
        with _opened(path) as file:
            end = file.tell()
            try:
                file.write(" " * _BLOCK)
                file.flush()
            finally:
                if path.is_file():
                    os.truncate(path, end)
    except OSError as error:
        raise _unwritable(path, error) from error


def _opened(path: Path) -> IO[str]:
    """`path` to append to, made with its folders if it is new, for nobody but its owner; held as long as it is open.

    Two servers with one log would write into each other's lines, and neither log could be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe is refused, and its reader not waited for
    file = os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # everybody may write to /dev/null
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:  # others: a file system without locks
                file.close()
                raise ConfigError(f"another server writes this request log; choose another file: {path}") from error
    return file


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the request log ({error.strerror}); choose another file: {path}")


class RequestLog:
    """An append-only file of at most `max_bytes`. A disk that fills up ends the log, not the server."""

    def __init__(self, path: Path, max_bytes: int, plain_tokens: bool = False) -> None:
        if max_bytes <= 0:
            raise ConfigError(f"the request log needs a size of more than zero bytes: {max_bytes}")
        try:
            self._file: IO[str] | None = _opened(path)
            if path.is_file():
                os.truncate(path, 0)
        except OSError as error:
            raise _unwritable(path, error) from error
        self._left = max_bytes
        self._plain = plain_tokens
        self._secret = secrets.randbits(63)

    def tokens(self, tokens: Tokens) -> list[int]:
        """`tokens` as they are written."""
        values: list[int] = (tokens if self._plain else chained(tokens, self._secret)).tolist()
        return values

    def name(self, key: bytes) -> int:
        """What a segment of `key` is called in this log, a whole number of 62 bits."""
        return (
            int.from_bytes(blake2b(key, digest_size=8, key=self._secret.to_bytes(8, "little")).digest(), "little") >> 2
        )

    def write(self, *line: Any) -> None:
        """Append one line; the last one of a log that is full says so."""
        if self._file is None:
            return
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._left -= len(text)
        try:
            if self._left < 0 or len(text) > LINE_BYTES:
                self._file.write('["full"]\n')
                logger.warning("the request log is full and ends here")
                self.close()
            else:
                self._file.write(text)
                self._file.flush()
        except OSError as error:
            logger.error("the request log cannot be written (%s) and ends here", error.strerror)
            with suppress(OSError):  # what is buffered cannot be written either
                self.close()

    def close(self) -> None:
        """Write what is buffered; later lines are dropped."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class RecordedDecisions(Decisions):
    """Decisions that are written down as they are taken."""

    def __init__(
        self,
        log: RequestLog,
        model: ModelSpec,
        policy: str,
        grid: int = 1,
        guarded: bool = True,
        shape: Mapping[str, int] | None = None,
    ) -> None:
        sizes = {name: (shape or {}).get(name, 0) for name in (*SHAPE, *BUDGET)}
        super().__init__(model, policy, where=Places(grid, sizes["step"], sizes["page"]), guarded=guarded)
        self._log = log
        costs = {key: value for key, value in asdict(model).items() if key in COSTS}
        log.write(VERSION, {"policy": policy, "grid": grid, "guarded": guarded, **costs, **sizes})

    def arrive(
        self,
        request_id: str,
        tokens: Tokens,
        now: float,
        cached_tokens: int,
        kv_tokens: int,
        namespace: str | None = None,
        boundaries: tuple[int, ...] = (),
        limit_tokens: int = NO_LIMIT,
        hints: Hints = NO_HINTS,
    ) -> Request:
        request = super().arrive(
            request_id, tokens, now, cached_tokens, kv_tokens, namespace, boundaries, limit_tokens, hints
        )
        name, values = self.namespaces.number(namespace), self._log.tokens(tokens)
        head = ("arrive", request_id, now, name, cached_tokens, kv_tokens, limit_tokens, boundaries)
        said = () if hints is NO_HINTS else hints
        self._log.write(*head, values, request.positions, request.seen_tokens, said)
        return request

    def marked(self, request: Request, segments: Sequence[tuple[int, int, bytes]]) -> None:
        super().marked(request, segments)
        self._log.write("segments", request.id, [(start, end, self._log.name(key)) for start, end, key in segments])

    def resumed(self, request: Request, held: Mark) -> None:
        known = next((at for at, mark in request.earlier if mark is held), None)
        super().resumed(request, held)
        if known is not None:  # of others the history learns nothing
            self._log.write("resumed", request.id, known)

    def computed(self, request_id: str) -> None:
        super().computed(request_id)
        self._log.write("computed", request_id)

    def finish(self, request: Request, tokens: Tokens, now: float, kept_tokens: int) -> None:
        super().finish(request, tokens, now, kept_tokens)
        answer = self._log.tokens(tokens)[request.prompt_tokens :]
        self._log.write("finish", request.id, now, len(tokens), answer, kept_tokens)

    def saved(self, request: Request, positions: list[int]) -> None:
        super().saved(request, positions)
        # A retracted request computes its answer like a prompt: of states in there nothing is learned.
        self._log.write("saved", request.id, [at for at in positions if at < request.key.size])

    def fit(self, states: int = UNLIMITED, kv_tokens: int = UNLIMITED, held_bytes: int = UNLIMITED) -> None:
        super().fit(states, kv_tokens, held_bytes)
        self._log.write("fit", states, kv_tokens, held_bytes)

    def flushed(self) -> None:
        super().flushed()
        self._log.write("flushed")

    def put(self, pool: PoolKind, candidate: Candidate) -> None:
        super().put(pool, candidate)
        self._log.write("put", pool.value, *candidate)

    def discard(self, pool: PoolKind, candidate_id: int) -> None:
        super().discard(pool, candidate_id)
        self._log.write("discard", pool.value, candidate_id)

    def victim(self, pool: PoolKind, now: float) -> int | None:
        alpha = self.flop_aware.alpha
        victim = super().victim(pool, now)
        self._log.write("victim", pool.value, now, victim, alpha)
        return victim

    def seed(self, tokens: Tokens, now: float, namespace: str | None = None) -> None:
        super().seed(tokens, now, namespace)
        self._log.write("seed", now, self.namespaces.number(namespace), self._log.tokens(tokens))
