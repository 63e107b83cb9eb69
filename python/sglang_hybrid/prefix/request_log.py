"""A record of every decision of a server, private by default, and its replay: the same questions, the same answers.

One JSON array a line. The first holds what `Decisions` was made with; then, in order of time:

| line | meaning |
| --- | --- |
| `["arrive", request, s, namespace, restart, known, limit, boundaries, tokens, positions, seen]` | a prefill began |
| `["computed", request]` | it is cached; behind `finish`: all of it that ever will be |
| `["finish", request, s, length, tokens behind the input, kept]` | it ended, in mid-prefill if shorter than its input |
| `["saved", request, positions]` | states of it are in the cache |
| `["fit", states, tokens, bytes]`, `["flushed"]` | what the cache has to get along with; it was emptied |
| `["put", pool, candidate...]`, `["discard", pool, id]` | what can be evicted |
| `["victim", pool, s, id, alpha]` | what was |
| `["seed", s, namespace, tokens]` | a hot prefix was announced |
| `["full"]` | the log has reached its size |

Tokens are written as chained hashes unless plain ones are asked for: a value depends on all tokens before it and on a
secret of this log, so equal prefixes stay equal, which is all that decisions depend on, and nothing can be read back.
"""

import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.candidates import Candidate
from sglang_hybrid.prefix.log_schema import LINE_BYTES, Damage, check_line, check_settings, parsed
from sglang_hybrid.prefix.serving import NO_LIMIT, TUNED, Arrival, Decisions, Pool
from sglang_hybrid.prefix.shadow import UNLIMITED
from sglang_hybrid.prefix.tokens import Tokens

logger = logging.getLogger(__name__)

VERSION = 4
_BLOCK = 4096  # bytes: more than any file has room for on a full disk
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def chained(tokens: Tokens, secret: int) -> Tokens:
    """A 30-bit value per token that depends on it, on everything before it, and on `secret`; shape as `tokens`."""
    with np.errstate(over="ignore"):
        index = np.arange(1, tokens.size + 1, dtype=np.uint64)
        mixed = _mix(tokens.astype(np.uint64) * _GOLDEN ^ _mix(index * _GOLDEN + np.uint64(secret)))
        values: Tokens = (_mix(np.cumsum(mixed, dtype=np.uint64)) >> np.uint64(34)).astype(np.int32)
    return values


def _mix(x: Any) -> Any:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def check_writable(path: Path) -> None:
    """Raise ConfigError unless a log at `path` can be written now; a file that is there keeps its content."""
    try:
        with _opened(path, "a") as file:
            end = file.tell()
            try:
                file.write(" " * _BLOCK)
                file.flush()
            finally:
                if path.is_file():
                    os.truncate(path, end)
    except OSError as error:
        raise _unwritable(path, error) from error


def _opened(path: Path, mode: str) -> IO[str]:
    """`path`, made with its folders if it is new, for nobody but its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the request log ({error.strerror}); choose another file: {path}")


class RequestLog:
    """An append-only file of at most `max_bytes`. A disk that fills up ends the log, not the server."""

    def __init__(self, path: Path, max_bytes: int, plain_tokens: bool = False) -> None:
        if max_bytes <= 0:
            raise ConfigError(f"the request log needs a size of more than zero bytes: {max_bytes}")
        try:
            self._file: IO[str] | None = _opened(path, "w")
        except OSError as error:
            raise _unwritable(path, error) from error
        self._left = max_bytes
        self._plain = plain_tokens
        self._secret = secrets.randbits(63)

    def tokens(self, tokens: Tokens) -> list[int]:
        """`tokens` as they are written."""
        values: list[int] = (tokens if self._plain else chained(tokens, self._secret)).tolist()
        return values

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
        admission: str,
        eviction: str,
        marconi_alpha: float,
        grid: int = 1,
        guarded: bool = True,
    ) -> None:
        super().__init__(model, admission, eviction, marconi_alpha, grid=grid, guarded=guarded)
        self._log = log
        costs = {key: value for key, value in asdict(model).items() if key in _COSTS}
        choices = dict(zip(_CHOICES, (admission, eviction, marconi_alpha, grid, guarded), strict=True))
        log.write(VERSION, {**choices, **costs})

    def arrive(
        self,
        request_id: str,
        tokens: Tokens,
        now: float,
        restart_tokens: int,
        known_tokens: int,
        namespace: str | None = None,
        boundaries: tuple[int, ...] = (),
        limit_tokens: int = NO_LIMIT,
    ) -> Arrival:
        arrival = super().arrive(
            request_id, tokens, now, restart_tokens, known_tokens, namespace, boundaries, limit_tokens
        )
        name, values = self._number(namespace), self._log.tokens(tokens)
        head = ("arrive", request_id, now, name, restart_tokens, known_tokens, limit_tokens, boundaries)
        self._log.write(*head, values, arrival.positions, arrival.seen_tokens)
        return arrival

    def computed(self, request_id: str) -> None:
        super().computed(request_id)
        self._log.write("computed", request_id)

    def finish(self, request_id: str, arrival: Arrival, tokens: Tokens, now: float, kept_tokens: int) -> None:
        n_input = arrival.key.size - 1
        super().finish(request_id, arrival, tokens, now, kept_tokens)
        tail = self._log.tokens(tokens)[n_input:]
        self._log.write("finish", request_id, now, len(tokens), tail, kept_tokens)

    def saved(self, request_id: str, arrival: Arrival, positions: list[int]) -> None:
        super().saved(request_id, arrival, positions)
        self._log.write("saved", request_id, positions)

    def fit(self, states: int = UNLIMITED, kv_tokens: int = UNLIMITED, held_bytes: int = UNLIMITED) -> None:
        super().fit(states, kv_tokens, held_bytes)
        self._log.write("fit", states, kv_tokens, held_bytes)

    def flushed(self) -> None:
        super().flushed()
        self._log.write("flushed")

    def put(self, pool: Pool, candidate: Candidate) -> None:
        super().put(pool, candidate)
        self._log.write("put", pool.value, *candidate)

    def discard(self, pool: Pool, candidate_id: int) -> None:
        super().discard(pool, candidate_id)
        self._log.write("discard", pool.value, candidate_id)

    def victim(self, pool: Pool, now: float) -> int | None:
        alpha = self.alpha
        victim = super().victim(pool, now)
        self._log.write("victim", pool.value, now, victim, alpha)
        return victim

    def seed(self, tokens: Tokens, now: float, namespace: str | None = None) -> None:
        super().seed(tokens, now, namespace)
        self._log.write("seed", now, self._number(namespace), self._log.tokens(tokens))


_COSTS = (
    "name",
    "kv_bytes_per_token",
    "checkpoint_bytes",
    "flops_per_token",
    "flops_per_token_pair",
    "context_tokens",
)
_CHOICES = ("admission", "eviction", "marconi_alpha", "grid", "guarded")


@dataclass
class Replayed:
    """What a replay found: how much it repeated, and the lines (numbers from 1) whose decision came out differently.

    `complete` is False if the log was full, or its last line was cut (`skipped` counts that one).
    """

    requests: int = 0
    checkpoints: int = 0
    evictions: int = 0
    differences: list[str] = field(default_factory=list)
    complete: bool = True
    skipped: int = 0


def replay(path: Path) -> Replayed:
    """Ask the questions of a log again, in a fresh `Decisions`, and compare every admission and eviction.

    Raises ConfigError for a file that is not a log, and for a damaged line, by its number and what is wrong with it.
    """
    number = 0
    try:
        with path.open("rb") as file:
            number = 1
            asked = _Replay(_decisions(_first(path, file.readline(LINE_BYTES + 1))))
            while raw := file.readline(LINE_BYTES + 1):
                number += 1
                if not raw.endswith(b"\n") and len(raw) <= LINE_BYTES:
                    asked.cut()  # the disk was full, or the server ended within a line
                    break
                line = parsed(raw)
                check_line(line)
                asked.line(f"line {number}", *line)
    except OSError as error:
        raise ConfigError(f"cannot read the request log ({error.strerror}): {path}") from error
    except Damage as error:
        raise ConfigError(
            f"the request log is damaged, let a server write another: {path}, line {number}: {error}"
        ) from error
    return asked.found


def _first(path: Path, raw: bytes) -> dict[str, Any]:
    """The settings in the first line."""
    match parsed(raw) if raw else None:
        case [int(version), dict() as settings] if version == VERSION:
            check_settings(settings)
            return settings
    raise ConfigError(f"name a request log of version {VERSION}, as this version's servers write it: {path}")


def _decisions(settings: dict[str, Any]) -> Decisions:
    choices = {key: settings[key] for key in _CHOICES}
    if choices["marconi_alpha"] == TUNED:
        choices["marconi_alpha"] = 0.0  # the weight at each eviction is in the log
    return Decisions(ModelSpec(**{key: settings[key] for key in _COSTS}), **choices)


class _Replay:
    """The decisions that are asked again, the requests under way, and what was found; a method per kind of line."""

    def __init__(self, decisions: Decisions) -> None:
        self.found = Replayed()
        self._decisions = decisions
        self._arrivals: dict[str, tuple[Arrival, Tokens]] = {}
        self._kinds: dict[str, Callable[..., None]] = {
            "arrive": self._arrive, "computed": self._computed, "finish": self._finish, "put": self._put,
            "discard": self._discard, "victim": self._victim, "seed": self._seed, "full": self._full,
            "saved": self._saved, "fit": self._fit, "flushed": self._flushed,
        }  # fmt: skip

    def line(self, where: str, kind: str, *values: Any) -> None:
        """Take a line that passed `check_line`; raises Damage where it contradicts those before it."""
        self._kinds[kind](where, *values)

    def cut(self) -> None:
        """The last line is not whole."""
        self.found.complete = False
        self.found.skipped += 1

    def _arrive(
        self, where: str, request: str, now: float, name: int, restart: int, known: int, limit: int,
        boundaries: list[int], tokens: list[int], positions: list[int], seen: int,
    ) -> None:  # fmt: skip
        if boundaries and max(boundaries) > len(tokens):
            raise Damage(f"boundaries lie in the {len(tokens)} tokens of the request", boundaries)
        values = np.array(tokens, np.int32)
        arrival = self._decisions.arrive(request, values, now, restart, known, str(name), tuple(boundaries), limit)
        self._arrivals[request] = arrival, values
        found = self.found
        found.requests += 1
        found.checkpoints += len(positions)
        if list(arrival.positions) != positions:
            found.differences.append(f"{where}: checkpoints at {list(arrival.positions)} instead of {positions}")
        if arrival.seen_tokens != seen:
            found.differences.append(f"{where}: {arrival.seen_tokens} tokens seen before instead of {seen}")

    def _computed(self, _: str, request: str) -> None:
        self._decisions.computed(request)
        if request in self._arrivals and self._arrivals[request][0].ended:
            del self._arrivals[request]

    def _finish(self, _: str, request: str, now: float, length: int, tail: list[int], kept: int) -> None:
        arrival, values = self._arrived(request)
        if arrival.ended:
            raise Damage("a request finishes once", request)
        whole = np.concatenate((values, np.array(tail, np.int32)))
        self._decisions.finish(request, arrival, whole[:length], now, kept)

    def _saved(self, _: str, request: str, positions: list[int]) -> None:
        arrival, _values = self._arrived(request)
        if positions and max(positions) > arrival.key.size - 1:
            raise Damage(f"states lie in the {arrival.key.size - 1} tokens of the request", positions)
        self._decisions.saved(request, arrival, positions)

    def _arrived(self, request: str) -> tuple[Arrival, Tokens]:
        if request not in self._arrivals:
            raise Damage("a request arrives before anything becomes of it", request)
        return self._arrivals[request]

    def _fit(self, _: str, *limits: int) -> None:
        self._decisions.fit(*limits)

    def _flushed(self, _: str) -> None:
        self._decisions.flushed()

    def _put(self, _: str, pool: str, *candidate: Any) -> None:
        self._decisions.put(Pool(pool), Candidate(*candidate))

    def _discard(self, _: str, pool: str, candidate_id: int) -> None:
        self._decisions.discard(Pool(pool), candidate_id)

    def _victim(self, where: str, pool: str, now: float, victim: int | None, alpha: float | None) -> None:
        self._decisions.alpha = alpha
        again = self._decisions.victim(Pool(pool), now)
        self.found.evictions += victim is not None
        if again != victim:
            self.found.differences.append(f"{where}: evicts {again} instead of {victim} from the {pool} pool")

    def _seed(self, _: str, now: float, name: int, tokens: list[int]) -> None:
        self._decisions.seed(np.array(tokens, np.int32), now, str(name))

    def _full(self, _: str) -> None:
        self.found.complete = False
