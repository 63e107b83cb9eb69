"""A damaged request log ends in one error that names file, line and value, and in nothing else."""

import copy
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid import cli
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix import log_schema
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.eviction.marconi import FlopAware, FlopAwareIndex
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.replay import replay
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog

SPEC = preset("qwen3-next-80b-a3b")
MESSAGE_CHARS = 700


@cache
def whole_log(policy: str) -> list[Any]:
    """The lines of a log with every kind of line, several times."""
    rng = random.Random(3)

    def words(n: int) -> Any:
        return np.array([rng.randrange(1000) for _ in range(n)], np.int32)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        log = RequestLog(path, 1_000_000)
        decisions = RecordedDecisions(log, SPEC, policy)
        shared = words(40)
        decisions.seed(shared[:30], 0.0)
        for n in range(12):
            prompt = np.concatenate((shared, words(20)))
            arrival = decisions.arrive(str(n), prompt, float(n), 0, 0, f"tenant {n % 2}", (20,))
            decisions.marked(arrival, [(5, 20, b"one"), (20, 50, b"other")])
            for pool in PoolKind:
                mark = decisions.mark(arrival, 20, float(n))
                row = (n, 20, 0, 0, 20, 1, 0, mark.last_s, mark.touch, mark.hits, False, mark.reuse_class)
                decisions.put(pool, Candidate(*row))
                if n % 4 == 3:
                    assert decisions.victim(pool, n + 0.5) is not None
                    decisions.discard(pool, n - 1)
            if arrival.earlier:
                decisions.resumed(arrival, arrival.earlier[0][1])
            decisions.computed(str(n))
            decisions.saved(arrival, [20, 40])
            decisions.finish(arrival, np.concatenate((prompt, words(8))), n + 0.7, 60)
            decisions.fit(states=8)
        decisions.flushed()
        log.close()
        return [json.loads(line) for line in path.read_text().splitlines()]


def as_bytes(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def check(content: bytes) -> str:
    """Replay `content`; returns the message of the error, "" without one. No other exception, and little memory."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            replay(path)
        except ConfigError as error:
            message = str(error)
            assert str(path) in message
            assert "line " in message or "version" in message
            assert len(message) < MESSAGE_CHARS
            assert "\n" not in message
            return message
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 32e6
        return ""


def test_the_log_that_is_damaged_here_is_whole() -> None:
    for policy in ("forecast", "marconi-online"):
        lines = whole_log(policy)
        assert {line[0] for line in lines[1:]} == set(log_schema.LINES) - {"full"}
        assert check(as_bytes(lines)) == ""


NASTY = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**30, 2**31 - 1, 2**31, -(2**31), 2**63, -(2**63), 10**30, 10**400])
    | st.floats()
    | st.sampled_from([5e-324, 1e-300, 1e15, 1e300, -1e15])
    | st.text(max_size=5)
    | st.sampled_from(["kv", "states", "arrive", "finish", "full", "0", "3", "\ud800", "all", "lru"])
    | st.lists(st.integers(-2, 2**33), max_size=4)
    | st.lists(st.lists(st.none(), max_size=2), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.none(), max_size=2)
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within `value`."""
    keys = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@given(st.sampled_from(["forecast", "marconi"]), st.data())
@settings(max_examples=250)
def test_values_of_any_kind_in_any_place(policy: str, data: st.DataObject) -> None:
    lines = copy.deepcopy(whole_log(policy))
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        at = data.draw(st.integers(0, len(lines) - 1), label="line")
        holder, key = data.draw(st.sampled_from([(lines, at), *places(lines[at])]), label="place")
        match data.draw(st.sampled_from(["set", "set", "set", "drop", "double", "move"]), label="change"):
            case "set":
                holder[key] = data.draw(NASTY, label="value")
            case "drop":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "move":
                lines.insert(data.draw(st.integers(0, len(lines) - 1), label="to"), lines.pop(at))
        if not lines:
            break
    check(as_bytes(lines))


@given(st.sampled_from(["forecast", "marconi"]), st.data())
@settings(max_examples=150)
def test_bytes_of_any_kind_in_any_place(policy: str, data: st.DataObject) -> None:
    content = as_bytes(whole_log(policy))
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        start = data.draw(st.integers(0, len(content)), label="start")
        end = start + data.draw(st.integers(0, 30) | st.just(len(content)), label="length")
        new = data.draw(
            st.binary(max_size=10) | st.sampled_from([b"[" * 9, b"9" * 5000, b"\n", b"\r", b"NaN", b"1e999"])
        )
        content = content[:start] + new + content[end:]
    check(content)


def arrival(lines: list[Any]) -> int:
    return next(n for n, line in enumerate(lines) if line[0] == "arrive")


def put(kind: str, at: int, value: Any) -> Callable[[list[Any]], int]:
    """A damage: `value` as the value number `at` of the first line of a kind; returns the number of the line."""

    def damage(lines: list[Any]) -> int:
        number = next(n for n, line in enumerate(lines) if line[0] == kind)
        lines[number][at] = value
        return number + 1

    return damage


INT32 = "whole numbers from 0 to 2147483647"
DAMAGES = {
    "unhashable kind": (put("seed", 0, []), r"a line begins with one of arrive, .*: \[\]"),
    "large token": (put("arrive", 8, [2**31]), rf"tokens must be a list of {INT32}: \[2147483648\]"),
    "infinite seconds": (put("arrive", 2, float("inf")), "s must be a number from -1e\\+15 to 1e\\+15: inf"),
    "no seconds": (put("victim", 2, float("nan")), "s must be a number .*: nan"),
    "text for a number": (put("put", 3, "twenty"), "end_tokens must be a whole number .*: 'twenty'"),
    "true for a number": (put("finish", 5, True), "kept must be a whole number .*: True"),
    "a large number": (put("discard", 2, 10**400), "id must be a whole number .*: 1000"),
    "an unknown class": (put("put", 13, 10**6), "reuse_class must be a whole number from 0 to .*: 1000000"),
    "an unknown pool": (put("put", 1, "disk"), "pool must be one of states, kv, .*: 'disk'"),
    "a boundary outside": (put("arrive", 7, [61]), r"boundaries lie in the 60 tokens of the request: \[61\]"),
    "an unknown request": (put("finish", 1, "nobody"), "a request arrives before anything .*: 'nobody'"),
    "a state outside": (put("saved", 2, [61]), r"states lie in the 60 tokens of the request: \[61\]"),
    "a segment outside": (put("segments", 2, [[5, 20, 1], [20, 61, 2]]), r"segments lie one .* the 60 tokens .* 61, 2"),
    "segments that overlap": (put("segments", 2, [[5, 20, 1], [19, 30, 2]]), "segments lie one behind the other"),
    "an empty segment": (put("segments", 2, [[5, 5, 1]]), r"segments must be a list of starts, .*: \[\[5, 5, 1\]\]"),
    "a segment without a name": (put("segments", 2, [[5, 6]]), r"segments must be a list of starts, .*: \[\[5, 6\]\]"),
    "true for a name": (put("segments", 2, [[5, 6, True]]), "segments must be a list of starts"),
    "segments of nobody": (put("segments", 1, "nobody"), "a request arrives before anything .*: 'nobody'"),
    "a number too many": (lambda lines: lines[1].append(1) or 2, "'seed' is followed by 3 values"),
    "negative costs": (lambda lines: lines[0][1].update(flops_per_token=-1) or 1, "flops_per_token must be .*: -1"),
    "a lost setting": (lambda lines: lines[0][1].pop("policy") and 1, "the settings of the .* lack one: 'policy'"),
    "a setting too many": (lambda lines: lines[0][1].update(rows=1) or 1, r"unknown settings: \['rows'\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_the_command_names_line_reason_and_value(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, reason = DAMAGES[name]
    lines = copy.deepcopy(whole_log("forecast"))
    number = damage(lines)
    path = tmp_path / "log.jsonl"
    path.write_bytes(as_bytes(lines))
    with pytest.raises(ConfigError, match=rf"log\.jsonl, line {number}: {reason}"):
        replay(path)
    assert cli.main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: the request log is damaged, let a server write another: ")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[" * 200_000 + b"\n", "lists in lists in lists"),
        (b"9" * 5_000 + b"\n", "numbers of thousands of digits"),
        (b'["seed", \xff]\n', "UTF-8 text .invalid start byte at byte 9"),
        (b"\n", "a JSON array .Expecting value at character"),
        (b"{}\n", "a JSON array: {}"),
        (b"[]\n", "begins with one of .*: None"),
        (b" " * (log_schema.LINE_BYTES + 1), f"no line is longer than {log_schema.LINE_BYTES} bytes"),
    ],
    ids=["brackets", "digits", "bytes", "empty", "object", "nothing", "endless"],
)
def test_text_that_is_no_line(raw: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = whole_log("forecast")
    path.write_bytes(as_bytes(lines) + raw)
    with pytest.raises(ConfigError, match=rf"line {len(lines) + 1}: .*{reason}"):
        replay(path)


def test_seconds_that_hardly_differ_are_no_division_by_zero() -> None:
    index = FlopAwareIndex(FlopAware(SPEC, 0.5))
    for n, seconds in enumerate((1e-320, 5e-324, 0.0)):
        index.put(Candidate(n, 20, 0, 0, 20, 1, 0, seconds, n, 0, False, 0))
    assert index.pop(1.0) == 0


def test_a_cut_last_line_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    content = as_bytes(whole_log("forecast"))
    path.write_bytes(content[:-9])
    assert cli.main(["replay", str(path)]) == 0
    assert "12 requests" in (out := capsys.readouterr().out)
    assert out.endswith("0 decided differently (the log ends early) (1 cut line skipped)\n")
    path.write_bytes(content + b'["full"]\n')
    found = replay(path)
    assert (found.complete, found.skipped) == (False, 0)


def test_a_line_longer_than_a_replay_reads_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hybrid.prefix.request_log.LINE_BYTES", 100)
    path = tmp_path / "log.jsonl"
    log = RequestLog(path, 1_000_000)
    log.write("computed", "a" * 50)
    log.write("computed", "a" * 100)
    assert path.read_text().splitlines()[1:] == ['["full"]']


def test_a_log_whose_name_is_no_text_is_replayed(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / os.fsdecode(b"log\xff.jsonl")
    path.write_bytes(as_bytes(whole_log("forecast")))
    assert cli.main(["replay", str(path)]) == 0
    assert b"log\\udcff.jsonl: 12 requests" in capfdbinary.readouterr().out


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot read the request log"):
            replay(path)
