"""Azure's LLM inference traces: arrival and lengths of each request (`TIMESTAMP,ContextTokens,GeneratedTokens`).

They hold no content. Which requests share a prefix is not known, so none does: every token id here is used once, and
every policy and every ceiling finds nothing to reuse. They tell how many requests come and how long they are.
"""

import numpy as np

from sglang_hybrid.sim.readers.mooncake import MOST_TOKENS
from sglang_hybrid.sim.readers.reading import Reading
from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.trace import TOKEN_LIMIT, TraceError, TraceRequest, make_request

NOTE = "the trace holds lengths and no content: no request can be known to share a prefix, so every hit rate is 0"


class Azure:
    """Takes one row after the other; token ids count upwards and never return."""

    def __init__(self, reading: Reading) -> None:
        self._next = 0
        self._reading = reading

    def __call__(self, row: Row) -> list[TraceRequest]:
        n_input, n_output = row.integer("contexttokens", least=1), row.integer("generatedtokens")
        if n_input + n_output > MOST_TOKENS:
            raise TraceError(f"{row.where}: a request of more than {MOST_TOKENS} tokens, got {n_input} + {n_output}")
        end = self._next + n_input + n_output
        if end > TOKEN_LIMIT:
            raise TraceError(f"{row.where}: cut the trace, int32 token ids end here: {end}")
        ids = np.arange(self._next, end, dtype=np.int32)
        request = make_request(ids[:n_input], ids[n_input:], row.seconds("timestamp"), row.where, where=row.where)
        self._next = end
        self._reading.notes[NOTE] = 1
        return [request]
