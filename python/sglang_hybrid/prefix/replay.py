"""A request log read again: the same questions to fresh decisions, and whether the answers are the same."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.reading import printable
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import Places
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.log_schema import (
    COSTS,
    LINE_BYTES,
    SLOTS_PER_PASS,
    Damage,
    check_line,
    check_settings,
    parsed,
)
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.request_log import READABLE, VERSION
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.tokens import Tokens


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


def read_log(path: Path) -> Generator[tuple[int, Any], None, None]:
    """The settings, then every line but the first with its number; a last line that is cut is [].

    Raises ConfigError for a file that is not a log, and for a damaged line, by its number and what is wrong with it.
    """
    number = 0
    try:
        with path.open("rb") as file:
            number = 1
            yield number, _first(path, file.readline(LINE_BYTES + 1))
            while raw := file.readline(LINE_BYTES + 1):
                number += 1
                if not raw.endswith(b"\n") and len(raw) <= LINE_BYTES:
                    yield number, []  # the disk was full, or the server ended within a line
                    return
                line = parsed(raw)
                check_line(line)
                yield number, line
    except OSError as error:
        raise ConfigError(f"cannot read the request log ({error.strerror}): {printable(path)}") from error
    except Damage as error:
        raise damaged(path, number, error) from error


def damaged(path: Path, number: int, error: Damage) -> ConfigError:
    """What to say of a damaged line."""
    where = f"{printable(path)}, line {number}"
    return ConfigError(f"the request log is damaged, let a server write another: {where}: {error}")


def replay(path: Path) -> Replayed:
    """Ask the questions of a log again, in a fresh `Decisions`, and compare every admission and eviction.

    Raises ConfigError as `read_log` does, and for a line that contradicts those before it.
    """
    with closing(read_log(path)) as lines:
        asked = _Replay(_decisions(next(lines)[1]))
        for number, line in lines:
            try:
                if line:
                    asked.line(f"line {number}", *line)
                else:
                    asked.cut()
            except Damage as error:
                raise damaged(path, number, error) from error
    return asked.found


def logged_hints(line: list[Any]) -> Hints:
    """The hints of a line, [] for none."""
    return Hints(*line) if line else NO_HINTS


def _first(path: Path, raw: bytes) -> dict[str, Any]:
    """The settings in the first line."""
    match parsed(raw) if raw else None:
        case [int(version), dict() as settings] if version in READABLE:
            if version < VERSION:
                settings.setdefault("pass_states", SLOTS_PER_PASS)
            check_settings(settings)
            return settings
    raise ConfigError(f"name a request log of version {VERSION}, as this version's servers write it: {printable(path)}")


def model_of(settings: dict[str, Any]) -> ModelSpec:
    """What the server's model costs."""
    return ModelSpec(**{key: settings[key] for key in COSTS})


def _decisions(settings: dict[str, Any]) -> Decisions:
    """As the server made them; where its tuner moved Marconi's weight, each eviction names it."""
    where = Places(settings["grid"], settings["step"], settings["page"])
    return Decisions(model_of(settings), settings["policy"], where=where, guarded=settings["guarded"])


class _Replay:
    """The decisions that are asked again, the requests under way, and what was found; a method per kind of line."""

    def __init__(self, decisions: Decisions) -> None:
        self.found = Replayed()
        self._decisions = decisions
        self._arrivals: dict[str, tuple[Request, Tokens]] = {}
        self._kinds: dict[str, Callable[..., None]] = {
            "arrive": self._arrive, "computed": self._computed, "finish": self._finish, "put": self._put,
            "discard": self._discard, "victim": self._victim, "seed": self._seed, "full": self._full,
            "saved": self._saved, "fit": self._fit, "flushed": self._flushed, "resumed": self._resumed,
            "segments": self._segments,
        }  # fmt: skip

    def line(self, where: str, kind: str, *values: Any) -> None:
        """Take a line that passed `check_line`; raises Damage where it contradicts those before it."""
        self._kinds[kind](where, *values)

    def cut(self) -> None:
        """The last line is not whole."""
        self.found.complete = False
        self.found.skipped += 1

    def _arrive(
        self, where: str, request: str, now: float, name: int, cached: int, kv: int, limit: int,
        boundaries: list[int], tokens: list[int], positions: list[int], seen: int, hints: list[Any],
    ) -> None:  # fmt: skip
        if boundaries and max(boundaries) > len(tokens):
            raise Damage(f"boundaries lie in the {len(tokens)} tokens of the request", boundaries)
        values = np.array(tokens, np.int32)
        arrival = self._decisions.arrive(
            request, values, now, cached, kv, str(name), tuple(boundaries), limit, logged_hints(hints)
        )
        self._arrivals[request] = arrival, values
        found = self.found
        found.requests += 1
        found.checkpoints += len(positions)
        if list(arrival.positions) != positions:
            found.differences.append(f"{where}: checkpoints at {list(arrival.positions)} instead of {positions}")
        if arrival.seen_tokens != seen:
            found.differences.append(f"{where}: {arrival.seen_tokens} tokens seen before instead of {seen}")

    def _segments(self, _: str, request: str, segments: list[list[int]]) -> None:
        arrival, values = self._arrived(request)
        ends = [0, *(at for start, end, _name in segments for at in (start, end)), len(values)]
        if ends != sorted(ends):
            raise Damage(f"segments lie one behind the other in the {len(values)} tokens of the request", segments)
        self._decisions.marked(arrival, [(start, end, str(name).encode()) for start, end, name in segments])

    def _resumed(self, _: str, request: str, position: int) -> None:
        arrival, _values = self._arrived(request)
        held = next((mark for at, mark in arrival.earlier if at == position), None)
        if held is None:
            raise Damage("a request resumes where the history knows a state", position)
        self._decisions.resumed(arrival, held)

    def _computed(self, _: str, request: str) -> None:
        self._decisions.computed(request)
        if request in self._arrivals and self._arrivals[request][0].ended:
            del self._arrivals[request]

    def _finish(self, _: str, request: str, now: float, length: int, tail: list[int], kept: int) -> None:
        arrival, values = self._arrived(request)
        if arrival.ended:
            raise Damage("a request finishes once", request)
        whole = np.concatenate((values, np.array(tail, np.int32)))
        self._decisions.finish(arrival, whole[:length], now, kept)

    def _saved(self, _: str, request: str, positions: list[int]) -> None:
        arrival, _values = self._arrived(request)
        if positions and max(positions) > arrival.key.size - 1:
            raise Damage(f"states lie in the {arrival.key.size - 1} tokens of the request", positions)
        self._decisions.saved(arrival, positions)

    def _arrived(self, request: str) -> tuple[Request, Tokens]:
        if request not in self._arrivals:
            raise Damage("a request arrives before anything becomes of it", request)
        return self._arrivals[request]

    def _fit(self, _: str, *limits: int) -> None:
        self._decisions.fit(*limits)

    def _flushed(self, _: str) -> None:
        self._decisions.flushed()

    def _put(self, _: str, pool: str, *candidate: Any) -> None:
        self._decisions.put(PoolKind(pool), Candidate(*candidate))

    def _discard(self, _: str, pool: str, candidate_id: int) -> None:
        self._decisions.discard(PoolKind(pool), candidate_id)

    def _victim(self, where: str, pool: str, now: float, victim: int | None, alpha: float) -> None:
        self._decisions.flop_aware.alpha = alpha
        again = self._decisions.victim(PoolKind(pool), now)
        self.found.evictions += victim is not None
        if again != victim:
            self.found.differences.append(f"{where}: evicts {again} instead of {victim} from the {pool} pool")

    def _seed(self, _: str, now: float, name: int, tokens: list[int]) -> None:
        self._decisions.seed(np.array(tokens, np.int32), now, str(name))

    def _full(self, _: str) -> None:
        self.found.complete = False
