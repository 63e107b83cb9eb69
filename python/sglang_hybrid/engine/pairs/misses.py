"""Why tokens of a prompt missed, from the server that prefills it to the one that answers.

SGLang hands over its four counts of cached tokens in a row of sixteen numbers, beside three of media. The last nine are
free in every version: as many as there are reasons without segments, which pairs refuse, and one for what was written.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache.hooks import explained
from sglang_hybrid.engine.cache.requests import tracked
from sglang_hybrid.prefix.misses import REASONS

NAMES = (*(f"miss_{reason}" for reason in REASONS if not reason.startswith("segment_")), "written")
"""In this order. The router pairs servers of one release only (`cluster/peers.py`), which have the same."""

FIRST = 7


def send(_: None, buffers: Any, req: Any) -> None:
    """After SGLang wrote what is handed over with the last chunk of `req`."""
    said = explained(None, tracked(req)) or {}
    row = buffers.cached_tokens[req.metadata_buffer_index]
    for at, name in enumerate(NAMES, FIRST):
        row[at] = said.get(name, 0)


def take(_: None, queue: Any, decode_req: Any) -> None:
    """After SGLang took what was handed over for a request. A server without our cache leaves nothing but zeros.

    The last token of a prompt is always computed, so what a prompt missed is never nothing.
    """
    buffers, at = queue.metadata_buffers, decode_req.metadata_buffer_index
    if not int(buffers.bootstrap_room[at, 0]):  # SGLang's own checks of health, for which nothing is handed over
        return
    row = buffers.cached_tokens[at, FIRST:].tolist()
    if any(row):
        counts = dict(zip(NAMES, row, strict=True))
        written = counts.pop(NAMES[-1])
        tracked(decode_req.req).told = {name: count for name, count in counts.items() if count} | {NAMES[-1]: written}
