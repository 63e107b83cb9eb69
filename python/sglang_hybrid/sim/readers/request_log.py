"""This project's own log of a server (`--hybrid-request-log`) as a trace: its prompts, answers, times, marks and hints.

Its tokens are chained hashes, or plain ones: equal prefixes are equal either way, within one log.
"""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.replay import logged_hints, model_of, read_log
from sglang_hybrid.sim.readers.reading import Reading
from sglang_hybrid.sim.saving import Saving, of_log
from sglang_hybrid.sim.trace import Segment, TraceError, TraceRequest, make_request


@dataclass
class _Asked:
    """A request of the log: where it stands, its first "arrive" line, and all its tokens as far as they are known."""

    where: str
    arrival: list[Any]
    tokens: list[int]
    length: int | None = None  # of prompt and answer, when it ended
    segments: list[list[int]] = field(default_factory=list)


def read(path: Path, name: str, reading: Reading) -> tuple[list[TraceRequest], ModelSpec, Saving]:
    """Requests of the log, called `name` in messages, what its server's model costs, how it saved; raises TraceError.

    A request that had not ended when the log did has no answer, one that ended within its prompt has that part of it.
    One that was retracted and came again with what it had answered is one request.
    """
    asked: list[_Asked] = []
    under_way: dict[str, _Asked] = {}
    try:
        with closing(read_log(path)) as lines:
            settings = next(lines)[1]
            model, saving = model_of(settings), of_log(settings)
            for number, line in lines:
                if not line:
                    reading.notes[f"{name}: the last line is cut and was skipped"] += 1
                elif line[0] == "arrive":
                    _arrive(f"{name}:{number}", line, asked, under_way)
                elif line[0] == "segments" and line[1] in under_way:
                    under_way[line[1]].segments = line[2]
                elif line[0] == "finish" and line[1] in under_way:
                    ended = under_way.pop(line[1])
                    ended.tokens, ended.length = (ended.tokens + line[4])[: line[3]], line[3]
                elif line[0] == "full":
                    reading.notes[f"{name}: the log was full and ends early"] += 1
    except ConfigError as error:
        raise TraceError(str(error)) from error
    if under_way:
        reading.notes[f"{name}: the log ends before the answers of so many requests: {len(under_way)}"] += 1
    if cached := sum(one.arrival[4] for one in asked):
        share = 100 * cached / sum(len(one.arrival[8]) for one in asked)
        reading.notes[
            f"{name}: its server had {share:.1f} % of the input tokens cached. Here nothing runs; "
            "`sglang-hybrid replay --simulate` plays the server itself"
        ] += 1
    home = asked[0].arrival[3] if asked else 0  # requests of one namespace keep their first tokens
    return [_request(one, home, reading) for one in asked if one.tokens], model, saving


def _arrive(where: str, line: list[Any], asked: list[_Asked], under_way: dict[str, _Asked]) -> None:
    tokens, before = line[8], under_way.get(line[1])
    if before is not None and tokens[: len(before.tokens)] == before.tokens:
        before.tokens = tokens
        return
    under_way[line[1]] = _Asked(where, line, tokens)
    asked.append(under_way[line[1]])


def _request(one: _Asked, home: int, reading: Reading) -> TraceRequest:
    session, now, namespace, boundaries, prompt, hints = (one.arrival[i] for i in (1, 2, 3, 7, 8, 11))
    tokens = reading.apart(np.array(one.tokens, np.int32), "" if namespace == home else str(namespace))
    n_input = min(len(prompt), tokens.size)
    answer = tokens[n_input:] if one.length is not None else tokens[:0]
    inside = tuple(at for at in boundaries if at <= n_input)
    segments = [Segment(*each) for each in one.segments if each[1] <= n_input]
    return make_request(
        tokens[:n_input], answer, now, session, where=one.where, boundaries=inside, hints=logged_hints(hints),
        segments=segments,
    )  # fmt: skip
