"""Mooncake's open traces: no tokens, but hashes of 512-token blocks (`timestamp` ms, `hash_ids`, lengths).

Each block hash becomes 512 token ids of its own, so requests share exactly the blocks that the trace says they share.
Output tokens are unknown and become ids that never return; reuse of answers is therefore a lower bound.
"""

import numpy as np

from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.trace import TOKEN_LIMIT, TraceError, TraceRequest, make_request

BLOCK_TOKENS = 512
MOST_TOKENS = 2**24  # no context is that long; a length beyond it is a corrupt row


class Mooncake:
    """Takes rows with `timestamp` (milliseconds), `hash_ids`, `input_length` and `output_length`, in their order."""

    def __init__(self) -> None:
        self._first_id: dict[int, int] = {}
        self._ramp = np.arange(BLOCK_TOKENS, dtype=np.int64)
        self._fresh = TOKEN_LIMIT  # ids that never return are handed out from the top downwards

    def __call__(self, row: Row) -> list[TraceRequest]:
        n_input = row.integer("input_length", least=1)
        n_output = row.integer("output_length") if "output_length" in row.fields else 0
        if n_input + n_output > MOST_TOKENS:
            raise TraceError(f"{row.where}: a request of more than {MOST_TOKENS} tokens, got {n_input} + {n_output}")
        blocks = row.items("hash_ids")
        needed = -(-n_input // BLOCK_TOKENS)
        if len(blocks) > needed:
            raise TraceError(
                f"{row.where}: {n_input} tokens cannot hold this many {BLOCK_TOKENS}-blocks: {len(blocks)}"
            )
        if not all(isinstance(h, int) and not isinstance(h, bool) for h in blocks):
            raise TraceError(f"{row.where}: hash_ids must be integers, got {blocks[:4]!r}")
        starts = (
            np.array([self._first_id.setdefault(h, len(self._first_id)) for h in blocks], dtype=np.int64) * BLOCK_TOKENS
        )
        known = (starts[:, None] + self._ramp).reshape(-1)[:n_input] if blocks else np.empty(0, dtype=np.int64)
        unknown = n_input - len(known)  # a trace may leave the last, partial block unhashed
        self._fresh -= unknown + n_output
        if len(self._first_id) * BLOCK_TOKENS >= self._fresh:
            raise TraceError(f"{row.where}: too many distinct blocks for int32 token ids: {len(self._first_id)}")
        filler = np.arange(self._fresh, self._fresh + unknown + n_output, dtype=np.int64)
        input_ids = np.concatenate([known, filler[:unknown]]).astype(np.int32)
        ts = row.number("timestamp") / 1000.0
        session = row.text("session_id", row.where)
        return [make_request(input_ids, filler[unknown:].astype(np.int32), ts, session, where=row.where)]
