"""What an SGLang server can write about its own traffic.

Two forms: the pickles of `--crash-dump-folder` and the dump-requests call (`{"requests": [(request, out, created,
finished), ...]}`), and the JSON log of `--log-requests --log-requests-level 3 --log-requests-format json`.

Pickles run code when they are opened by the ordinary loader. Ours never imports or calls anything the file names: each
class becomes an inert record and only token arrays are rebuilt. A dump from a stranger is therefore safe to read.
"""

import array
import pickle
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import IO, Any

import numpy as np

from sglang_hybrid.prefix.reuse.hints import NAMES, NO_HINTS, Hints
from sglang_hybrid.sim.readers.reading import Reading
from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.trace import Segment, Tokens, TraceError, TraceRequest, make_request

_HEALTH_CHECK = "HEALTH_CHECK"  # how the ids of SGLang's own probes begin


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


def looks_pickled(head: bytes) -> bool:
    """Whether a file that begins with `head` is a pickle of protocol 2 or newer."""
    return len(head) >= 2 and head[0] == 0x80 and head[1] <= 5


class Dump:
    """Reads what a server writes; `reading` turns text into tokens."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def pickled(self, file: IO[bytes], name: str) -> Iterator[TraceRequest]:
        """Requests of a pickled dump; raises TraceError with the number of the offending request."""
        try:
            dump = _InertUnpickler(file).load()
        except Exception as error:  # a corrupt pickle can raise almost anything
            raise TraceError(f"{name}: not a readable SGLang request dump: {error}") from error
        records = dump.get("requests") if isinstance(dump, dict) else dump
        if not isinstance(records, list):
            raise TraceError(f"{name}: a dump holds a list under 'requests', got {type(records).__name__}")
        for number, record in enumerate(records, 1):
            where = f"{name}: request {number}"
            if not isinstance(record, list | tuple) or len(record) < 3 or not isinstance(record[2], int | float):
                raise TraceError(
                    f"{where}: a record is (request, output, created seconds, ...), got {type(record).__name__}"
                )
            first = record[0]
            asked: dict[str, Any] = first if isinstance(first, dict) else dict(getattr(first, "__dict__", {}))
            answered = record[1] if isinstance(record[1], dict) else {}
            yield self._request(asked, answered, float(record[2]), where)

    def __call__(self, row: Row) -> list[TraceRequest]:
        """The request of a finished event, or of a row with plain `input_ids`, `output_ids` and `ts` seconds."""
        if "event" not in row.fields:
            return [self._request(row.fields, row.fields, row.number("ts"), row.where)]
        if row.fields["event"] != "request.finished":
            return []
        asked, answered = row.fields.get("obj"), row.fields.get("out")
        if not isinstance(asked, dict) or not isinstance(answered, dict):
            raise TraceError(f"{row.where}: a finished event needs objects 'obj' and 'out', got {asked!r}")
        if str(asked.get("rid")).startswith(_HEALTH_CHECK):
            return []
        meta = answered.get("meta_info")
        self._check_answer(answered, meta)
        latency = Row(row.where, {"e2e_latency": 0.0, **(meta if isinstance(meta, dict) else {})})
        arrival = row.seconds("timestamp") - latency.number("e2e_latency")
        return [self._request(asked, answered, arrival, row.where)]

    def _check_answer(self, answered: dict[str, Any], meta: Any) -> None:
        """Say so where the log has less of an answer than was made."""
        made = meta.get("completion_tokens") if isinstance(meta, dict) else None
        logged = answered.get("output_ids")
        if isinstance(made, int) and isinstance(logged, list) and len(logged) < made:
            self._reading.notes["of an answer only the last tokens were logged (--incremental-streaming-output)"] += 1

    def _request(self, asked: dict[str, Any], answered: dict[str, Any], ts: float, where: str) -> TraceRequest:
        prompt = _ids(asked, "input_ids", where)
        text = asked.get("text")
        reply = answered.get("text")
        output = _ids(answered, "output_ids", where)
        if prompt is None and isinstance(text, str) and text:
            prompt = self._reading.encode(text)
            output = self._reading.encode(reply) if isinstance(reply, str) else output  # so that a next turn meets it
        if prompt is None:
            raise TraceError(f"{where}: no tokens and no text; log with --log-requests-level 3: input_ids")
        if output is None:
            output = self._reading.encode(reply) if isinstance(reply, str) and reply else []
        session = str(asked.get("session_id") or asked.get("rid") or where)
        marks, said = _declared(asked, "cache_boundaries", list, where), _declared(asked, "cache_hints", dict, where)
        ranges = _declared(asked, "segments", list, where)
        if ranges and _ids(asked, "input_ids", where) is None:
            self._reading.notes["segments count real tokens, and were left out where there is only text"] += 1
            ranges = None
        namespace = "".join(f"{key} {asked[key]}\n" for key in ("extra_key", "lora_path") if asked.get(key))
        request = make_request(
            prompt, output, ts, session, where=where, boundaries=marks or [], hints=_hints(said or {}, where),
            segments=_segments(ranges or [], where),
        )  # fmt: skip
        named = [_named(request, each, namespace) for each in request.segments] if namespace else request.segments
        return replace(request, tokens=self._reading.apart(request.tokens, namespace), segments=tuple(named))


def _declared(asked: dict[str, Any], name: str, kind: type, where: str) -> Any:
    """What `custom_params` of a request to this project's servers say under `name`, None if nothing."""
    found: Any = asked
    for key in ("sampling_params", "custom_params", name):
        found = found.get(key) if isinstance(found, dict) else None
    if found is not None and not isinstance(found, kind):
        raise TraceError(f"{where}: {name} must be a {kind.__name__}, got {type(found).__name__}")
    return found


def _segments(ranges: list[Any], where: str) -> list[Segment]:
    if not all(isinstance(each, list) and len(each) == 2 for each in ranges):
        raise TraceError(f"{where}: segments are pairs of token positions, got {ranges!r:.80}")
    return [Segment(*each) for each in ranges]


def _named(request: TraceRequest, segment: Segment, namespace: str) -> Segment:
    """`segment` of a tenant, who shares it with nobody."""
    about = namespace.encode() + request.tokens[segment.start : segment.end].tobytes()
    return segment._replace(name=int.from_bytes(blake2b(about, digest_size=8).digest(), "little") >> 2)


def _hints(said: dict[str, Any], where: str) -> Hints:
    final, *seconds = (said.get(name, default) for name, default in zip(NAMES, NO_HINTS, strict=True))
    if not isinstance(final, bool) or not all(type(s) in (int, float) and abs(s) <= 1e15 for s in seconds):
        raise TraceError(f"{where}: cache_hints are true or false and seconds, got {said!r:.80}")
    return Hints(final, *map(float, seconds)) if said else NO_HINTS


def _ids(record: dict[str, Any], key: str, where: str) -> list[int] | Tokens | None:
    value = record.get(key)
    if not isinstance(value, list | tuple | array.array) or not len(value):
        return None
    if any(isinstance(v, list | tuple) for v in value):
        raise TraceError(f"{where}: batched requests are not supported, send them one by one: {key}")
    if "..." in value:
        raise TraceError(f"{where}: the log was cut, write it with --log-requests-level 3: {key}")
    return np.asarray(value)
