"""The trace format of Marconi's artifact: one request a line with its token ids (`session_id, turn_id, ts, ...`)."""

import json
from pathlib import Path

from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.trace import Trace, TraceError, TraceRequest, make_request


def read(row: Row) -> list[TraceRequest]:
    """The request of a row with `input_tokens`, `output_tokens` (lists of ids) and `ts` (seconds)."""
    request = make_request(
        row.items("input_tokens"),
        row.items("output_tokens"),
        row.number("ts"),
        row.text("session_id", row.where),
        row.integer("turn_id") if "turn_id" in row.fields else 0,
        row.where,
    )
    for key, count in (("num_input_tokens", request.n_input), ("num_output_tokens", request.n_output)):
        if key in row.fields and row.integer(key) != count:
            raise TraceError(f"{row.where}: {key} says {row.fields[key]}, but the list holds {count}")
    return [request]


def write(trace: Trace, path: Path) -> None:
    """Write a trace so that Marconi's artifact, and `read`, can load it."""
    with path.open("w", encoding="utf-8") as out:
        for r in trace.requests:
            row = {
                "session_id": int(r.session) if r.session.isdecimal() else r.session,
                "turn_id": r.turn,
                "ts": r.ts,
                "num_input_tokens": r.n_input,
                "num_output_tokens": r.n_output,
                "input_tokens": r.input_tokens.tolist(),
                "output_tokens": r.output_tokens.tolist(),
            }
            out.write(json.dumps(row, separators=(",", ":")) + "\n")
