"""Trace files: one reader per format, chosen by looking at the first bytes and the first row.

Every reader raises TraceError naming file and line. None needs a tokenizer; formats that carry text fall back to
`readers.text`, which is deterministic and prefix-stable.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from sglang_hybrid.sim.readers import chat, marconi, mooncake, sglang_dump
from sglang_hybrid.sim.readers.rows import Row, read_rows
from sglang_hybrid.sim.trace import Request, Trace, TraceError, make_trace

RowReader = Callable[[Iterator[Row]], Iterator[Request]]


def read_trace(path: str | Path, format: str | None = None) -> Trace:
    """Read a trace file; `format` is a key of FORMATS, or None to detect it. Raises TraceError."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"no such trace file; give a path or workload:NAME: {path}")
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown trace format, choose one of {', '.join(FORMATS)}: {format}")
    if format == "sglang-pickle" or (format is None and sglang_dump.looks_pickled(path)):
        return make_trace(path.stem, sglang_dump.read_pickle(path))
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise TraceError(f"the trace file is empty; write at least one request into it: {path}")
    reader = FORMATS[format or detect(first)]
    return make_trace(path.stem, reader(_chain(first, rows)))


def detect(row: Row) -> str:
    """The format of a JSONL file by the keys of its first row; raises TraceError when none fits."""
    for name, keys in _KEYS:
        if keys <= row.fields.keys():
            return name
    found = ", ".join(sorted(row.fields)[:8])
    raise TraceError(f"{row.where}: no known trace format has these keys; pass --format: {found}")


def _chain(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rest


def _no_rows(rows: Iterator[Row]) -> Iterator[Request]:
    raise TraceError("a pickled dump has no rows; this format reads whole files: sglang-pickle")


_KEYS: tuple[tuple[str, frozenset[str]], ...] = (
    ("marconi", frozenset({"input_tokens", "output_tokens"})),
    ("mooncake", frozenset({"hash_ids", "input_length"})),
    ("sglang-jsonl", frozenset({"event", "timestamp"})),
    ("sglang-jsonl", frozenset({"input_ids"})),
    ("chat", frozenset({"messages"})),
    ("chat", frozenset({"conversations"})),
    ("chat", frozenset({"body"})),
)

FORMATS: dict[str, RowReader] = {
    "marconi": marconi.read,
    "mooncake": mooncake.read,
    "sglang-jsonl": sglang_dump.read_log,
    "sglang-pickle": _no_rows,
    "chat": chat.read,
}
