"""docs/traces.md: every example is read as the format it stands under, and every format that is text has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_hybrid.sim import cli
from sglang_hybrid.sim.readers import FORMATS, read_trace

PAGE = (Path(__file__).parents[3] / "docs" / "traces.md").read_text(encoding="utf-8")
_PART = re.compile(r"^## `(?P<format>[\w-]+)`|^```(?P<file>\S+)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL)

REQUESTS = {
    "server.log": 2, "rows.jsonl": 2, "requests.log": 1, "messages.jsonl": 2, "segments.jsonl": 1, "batch.jsonl": 1,
    "sharegpt.json": 1, "marconi.jsonl": 1, "mooncake.jsonl": 2, "azure.csv": 2,
}  # fmt: skip


def examples() -> list[tuple[str, str, str]]:
    """Format, file name and content of each example of the page."""
    found, format = [], ""
    for part in _PART.finditer(PAGE):
        if part["format"]:
            format = part["format"]
        else:
            found.append((format, part["file"], part["content"]))
    return found


@pytest.mark.parametrize(("format", "name", "content"), examples(), ids=[name for _, name, _ in examples()])
def test_an_example_is_a_trace_of_its_format(tmp_path: Path, format: str, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    found, forced = read_trace(path), read_trace(path, format)
    assert len(found) == REQUESTS[name]
    assert [r.tokens.tolist() for r in found.requests] == [r.tokens.tolist() for r in forced.requests]
    assert cli.main([str(path), "--policy", "lru", "--capacity-gb", "1", "--jobs", "1"]) == 0


def test_every_format_has_its_place_on_the_page() -> None:
    assert set(re.findall(r"^## `([\w-]+)`", PAGE, re.MULTILINE)) == set(FORMATS)
    assert {format for format, _, _ in examples()} == set(FORMATS) - {"sglang-pickle"}
    assert {name for _, name, _ in examples()} == set(REQUESTS)


def test_what_the_page_says_of_its_examples(tmp_path: Path) -> None:
    for _, name, content in examples():
        (tmp_path / name).write_text(content)
    first, second = read_trace(tmp_path / "server.log").requests
    assert (first.boundaries, second.ts - first.ts) == ((2,), 2.25)
    (log,) = read_trace(tmp_path / "requests.log").requests
    assert (log.boundaries, log.n_input, log.n_output) == ((3,), 5, 2)
    assert [each[:2] for each in log.segments] == [(1, 4)]
    (marking,) = read_trace(tmp_path / "segments.jsonl").requests
    assert len(marking.segments) == 1
    (shared,) = read_trace(tmp_path / "sharegpt.json").requests
    assert shared.n_output == 3  # its first answer
    a, b = read_trace(tmp_path / "mooncake.jsonl").requests
    assert int((a.tokens[:1100] == b.tokens[:1100]).argmin()) == 1024
    _, answered = read_trace(tmp_path / "messages.jsonl").requests
    assert (answered.ts, answered.n_output > 0) == (5.0, True)
