"""Rows of a text file: JSON lines, a JSON array, CSV, or the JSON records of SGLang among other log lines."""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any

from sglang_hybrid.sim.readers.reading import Reading
from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.trace import TraceError

Line = tuple[int, bytes]

AZURE_HEADER = ("timestamp", "contexttokens", "generatedtokens")
_BOM = b"\xef\xbb\xbf"
_RECORD = re.compile(r'\{"timestamp":\s*"[^"]*",\s*"event":\s*"')  # how SGLang's logger begins one, behind a time
_ARRAY = re.compile(rb"\[\s*(\{|\]|$)")
_REQUEST_LOG = re.compile(rb"\[\s*\d+\s*,\s*\{")
_BETWEEN = re.compile(r"[\s,]*")
_decoder = json.JSONDecoder()


def is_request_log(head: bytes) -> bool:
    """Whether a file that begins with `head` is a log of `--hybrid-request-log`."""
    return _REQUEST_LOG.match(head) is not None


def read_rows(file: IO[bytes], name: str, reading: Reading) -> Iterator[Row]:
    """The rows of `file`, blank lines skipped; a last line that is cut is skipped with a note.

    Raises TraceError with the number of the line or array entry, unless `reading` skips what is bad.
    """
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    head = first[1].removeprefix(_BOM).strip()
    everything = chain([(first[0], first[1].removeprefix(_BOM))], lines)
    if _ARRAY.match(head):
        yield from _array(everything, name, reading)
    elif head.lower().split(b",")[:3] == [part.encode() for part in AZURE_HEADER]:
        yield from _csv(everything, name, reading)
    elif head.startswith(b"{") and not _RECORD.match(head.decode("utf-8", "replace")):
        yield from _json_lines(everything, name, reading)
    else:
        yield from _log(everything, name, reading)


def _json_lines(lines: Iterator[Line], name: str, reading: Reading) -> Iterator[Row]:
    for number, line in lines:
        where = f"{name}:{number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not _cut(line, name, reading):
                reading.bad(TraceError(f"{where}: not a line of JSON, mend or remove it: {error}"))
            continue
        if isinstance(fields, dict):
            yield Row(where, fields)
        else:
            reading.bad(TraceError(f"{where}: a row must be a JSON object, got {type(fields).__name__}"))


def _log(lines: Iterator[Line], name: str, reading: Reading) -> Iterator[Row]:
    records = 0
    for number, line in lines:
        text = line.decode("utf-8", "replace")
        record = _RECORD.search(text)
        while record is not None:
            records += 1
            try:
                fields, end = _decoder.raw_decode(text, record.start())
            except (ValueError, RecursionError) as error:
                if not _cut(line, name, reading):
                    reading.bad(TraceError(f"{name}:{number}: not a record of JSON, mend or remove it: {error}"))
                break
            yield Row(f"{name}:{number}", fields)
            record = _RECORD.search(text, end)
    if not records:
        raise TraceError(
            f"{name}:1: not a line of JSON, and no request in the file as SGLang logs it; start the server with "
            f"--log-requests --log-requests-level 3 --log-requests-format json: {name}"
        )


def _array(lines: Iterator[Line], name: str, reading: Reading) -> Iterator[Row]:
    try:
        text = b"".join(line for _, line in lines).decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: a JSON array must be UTF-8 text: {error}") from error
    at, number = text.index("[") + 1, 0
    while True:
        at = _skip(text, at)
        if text.startswith("]", at):
            return
        number += 1
        where = f"{name}: entry {number}"
        try:
            value, at = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            reading.bad(TraceError(f"{where}: not JSON, or the array is cut here, mend or end it: {error}"))
            return  # where the next entry begins cannot be told
        if isinstance(value, dict):
            yield Row(where, value)
        else:
            reading.bad(TraceError(f"{where}: a row must be a JSON object, got {type(value).__name__}"))


def _skip(text: str, at: int) -> int:
    between = _BETWEEN.match(text, at)
    return at if between is None else between.end()


def _csv(lines: Iterator[Line], name: str, reading: Reading) -> Iterator[Row]:
    names = next(lines)[1].decode("utf-8", "replace").strip().split(",")
    for number, line in lines:
        cells = line.decode("utf-8", "replace").strip().split(",")
        if len(cells) == len(names):
            yield Row(f"{name}:{number}", {key.lower(): _cell(cell) for key, cell in zip(names, cells, strict=True)})
        elif not _cut(line, name, reading):
            reading.bad(TraceError(f"{name}:{number}: a row has {len(names)} columns, got {len(cells)}"))


def _cell(text: str) -> Any:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text


def _cut(line: bytes, name: str, reading: Reading) -> bool:
    """Whether `line` is the last one and not whole: the server that writes it still runs, or was ended."""
    if line.endswith(b"\n"):
        return False
    reading.notes[f"{name}: the last line is cut and was skipped"] += 1
    return True
