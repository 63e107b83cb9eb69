"""Trace files: one reader per format, chosen by looking at the first bytes and the first row.

Every reader raises TraceError naming file and line. None needs a tokenizer; formats that carry text fall back to
`readers.text`, which is deterministic and prefix-stable. docs/traces.md shows a line of each.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from sglang_hybrid.core.reading import printable
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.sim.readers import marconi, request_log
from sglang_hybrid.sim.readers.azure import Azure
from sglang_hybrid.sim.readers.chat import Chat
from sglang_hybrid.sim.readers.files import files_of, name_of, opened, plain
from sglang_hybrid.sim.readers.lines import AZURE_HEADER, is_request_log, read_rows
from sglang_hybrid.sim.readers.mooncake import Mooncake
from sglang_hybrid.sim.readers.reading import Reading
from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.readers.sglang_dump import Dump, looks_pickled
from sglang_hybrid.sim.saving import Saving
from sglang_hybrid.sim.trace import Trace, TraceError, TraceRequest, make_trace

RowReader = Callable[[Row], list[TraceRequest]]

ROWS: dict[str, Callable[[Reading], RowReader]] = {
    "marconi": lambda reading: marconi.read,
    "mooncake": lambda reading: Mooncake(),
    "azure": Azure,
    "sglang-jsonl": Dump,
    "chat": Chat,
}
FORMATS = (*ROWS, "sglang-pickle", "request-log")


def read_trace(
    path: str | Path, format: str | None = None, *, skip_bad: bool = False, tokenizer: Path | None = None
) -> Trace:
    """Read a trace file, or a folder of files of one format, compressed or not.

    `format` is one of FORMATS, or None to detect it. `skip_bad` counts rows that cannot be used instead of refusing the
    trace. `tokenizer` is a folder whose tokenizer.json turns text into tokens. Raises TraceError.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown trace format, choose one of {', '.join(FORMATS)}: {format}")
    files = files_of(path)
    folder = _Folder(Reading(skip_bad, tokenizer), format)
    for file in files:
        folder.add(file, alone=len(files) == 1)
    asked = folder.format != "marconi"  # which was written for the paper's cache
    return make_trace(name_of(path), folder.requests, folder.reading.all_notes(), folder.model, asked, folder.saving)


def detect(row: Row) -> str:
    """The format of a file by the keys of its first row; raises TraceError when none fits."""
    for name, keys in _KEYS:
        if keys <= row.fields.keys():
            return name
    found = ", ".join(sorted(row.fields)[:8])
    raise TraceError(f"{row.where}: no known trace format has these keys; pass --format: {found}")


class _Folder:
    """The requests of files that belong together; one reader takes the rows of all."""

    def __init__(self, reading: Reading, format: str | None) -> None:
        self.reading = reading
        self.requests: list[TraceRequest] = []
        self.model: ModelSpec | None = None
        self.saving: Saving | None = None
        self._forced = format
        self._found: tuple[str, str] | None = None  # the format, and the file that has it
        self._reader: RowReader | None = None

    @property
    def format(self) -> str:
        """The format that was found; empty before anything was read."""
        return self._found[0] if self._found else ""

    def add(self, file: Path, alone: bool) -> None:
        """Read one file; raises TraceError, also if its format is another than that of the files before."""
        with opened(file) as content:
            head = content.peek(4096)
            if self._is("sglang-pickle", looks_pickled(head)):
                self._same("sglang-pickle", file)
                self.requests += Dump(self.reading).pickled(content, printable(file.name))
            elif self._is("request-log", is_request_log(head)):
                self._same("request-log", file)
                self._add_log(file)
            else:
                self._add_rows(file, read_rows(content, printable(file.name), self.reading), alone)

    def _add_rows(self, file: Path, rows: Iterator[Row], alone: bool) -> None:
        said = self.reading.notes.total()
        first = next(rows, None)
        if first is None:
            if self.reading.notes.total() > said:
                return  # what was in it could not be used
            if alone:
                raise TraceError(f"the trace file is empty; write at least one request into it: {file}")
            self.reading.notes[f"{printable(file.name)}: the file is empty"] += 1
            return
        name = self._forced or detect(first)
        self._same(name, file)
        reader = self._reader = self._reader or ROWS[name](self.reading)
        for row in chain([first], rows):
            try:
                self.requests += reader(row)
            except TraceError as error:
                self.reading.bad(error)

    def _add_log(self, file: Path) -> None:
        if self.model is not None:
            raise TraceError(f"give one request log at a time, each counts time from its server's start: {file}")
        with plain(file) as path:
            requests, self.model, self.saving = request_log.read(path, printable(file.name), self.reading)
        self.requests += requests

    def _is(self, format: str, looks: bool) -> bool:
        return self._forced == format or (self._forced is None and looks)

    def _same(self, format: str, file: Path) -> None:
        if self._found is None:
            self._found = format, printable(file.name)
        if self._found[0] != format:
            known, before = self._found
            raise TraceError(
                f"a folder holds traces of one format, move the others away ({before} is {known}): "
                f"{printable(file.name)} is {format}"
            )


_KEYS: tuple[tuple[str, frozenset[str]], ...] = (
    ("marconi", frozenset({"input_tokens", "output_tokens"})),
    ("mooncake", frozenset({"hash_ids", "input_length"})),
    ("azure", frozenset(AZURE_HEADER)),
    ("sglang-jsonl", frozenset({"event", "timestamp"})),
    ("sglang-jsonl", frozenset({"input_ids"})),
    ("chat", frozenset({"messages"})),
    ("chat", frozenset({"conversations"})),
    ("chat", frozenset({"body"})),
)
