"""What an SGLang server can write about its own traffic.

Two forms: the pickles of `--crash-dump-folder` and the dump-requests call (`{"requests": [(request, out, created,
finished), ...]}`), and the JSON log of `--log-requests --log-requests-level 3 --log-requests-format json`.

Pickles run code when they are opened by the ordinary loader. Ours never imports or calls anything the file names: each
class becomes an inert record and only token arrays are rebuilt. A dump from a stranger is therefore safe to read.
"""

import array
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.readers.text import tokenize
from sglang_hybrid.sim.trace import Request, Tokens, TraceError, make_request


class Inert:
    """Stands in for any class of a pickle: keeps attributes, runs nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("array", "_array_reconstructor"):
            return _array
        if (module, name) == ("array", "array"):
            return array.array
        return type(name.rpartition(".")[2], (Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        return Inert()


def _array(kind: Any, typecode: str, format_code: int, data: bytes) -> "array.array[Any]":
    """Rebuild a token array written on a machine of the same byte order; refuses anything that is not integers."""
    if typecode not in "bBhHiIlLqQ" or not isinstance(data, bytes):
        raise pickle.UnpicklingError(f"an array of this type holds no tokens: {typecode!r}")
    return array.array(typecode, data)


def looks_pickled(path: Path) -> bool:
    """Whether the file starts like a pickle of protocol 2 or newer."""
    with path.open("rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] <= 5


def read_pickle(path: Path) -> Iterator[Request]:
    """Requests of a pickled dump; raises TraceError with the number of the offending request."""
    try:
        with path.open("rb") as file:
            dump = _InertUnpickler(file).load()
    except Exception as error:  # a corrupt pickle can raise almost anything
        raise TraceError(f"{path.name}: not a readable SGLang request dump: {error}") from error
    records = dump.get("requests") if isinstance(dump, dict) else dump
    if not isinstance(records, list):
        raise TraceError(f"{path.name}: a dump holds a list under 'requests', got {type(records).__name__}")
    for number, record in enumerate(records, 1):
        where = f"{path.name}: request {number}"
        if not isinstance(record, list | tuple) or len(record) < 3 or not isinstance(record[2], int | float):
            raise TraceError(
                f"{where}: a record is (request, output, created seconds, ...), got {type(record).__name__}"
            )
        asked: dict[str, Any] = record[0] if isinstance(record[0], dict) else dict(getattr(record[0], "__dict__", {}))
        answered = record[1] if isinstance(record[1], dict) else {}
        yield _request(asked, answered, float(record[2]), where)


def read_log(rows: Iterator[Row]) -> Iterator[Request]:
    """Requests of a JSON log (finished events only), or rows with plain `input_ids`, `output_ids` and `ts` seconds."""
    for row in rows:
        if "event" not in row.fields:
            yield _request(row.fields, row.fields, row.number("ts"), row.where)
        elif row.fields["event"] == "request.finished":
            asked, answered = row.fields.get("obj"), row.fields.get("out")
            if not isinstance(asked, dict) or not isinstance(answered, dict):
                raise TraceError(f"{row.where}: a finished event needs objects 'obj' and 'out', got {asked!r}")
            meta = answered.get("meta_info")
            latency = Row(row.where, {"e2e_latency": 0.0, **(meta if isinstance(meta, dict) else {})})
            arrival = row.seconds("timestamp") - latency.number("e2e_latency")
            yield _request(asked, answered, arrival, row.where)


def _request(asked: dict[str, Any], answered: dict[str, Any], ts: float, where: str) -> Request:
    input_ids = _ids(asked, "input_ids", where)
    if input_ids is None:
        raise TraceError(f"{where}: no tokens and no text; log with --log-requests-level 3: input_ids")
    output_ids = _ids(answered, "output_ids", where)
    session = asked.get("session_id") or asked.get("rid") or where
    return make_request(input_ids, output_ids if output_ids is not None else [], ts, str(session), where=where)


def _ids(record: dict[str, Any], key: str, where: str) -> list[int] | Tokens | None:
    value = record.get(key)
    if isinstance(value, list | tuple | array.array) and len(value):
        if any(isinstance(v, list | tuple) for v in value):
            raise TraceError(f"{where}: batched requests are not supported, send them one by one: {key}")
        if "..." in value:
            raise TraceError(f"{where}: the log was cut, write it with --log-requests-level 3: {key}")
        return np.asarray(value)
    text = record.get("text")
    return tokenize(text) if isinstance(text, str) and text else None
