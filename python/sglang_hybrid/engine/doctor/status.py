"""What any running server says of its cache: hit rate, why tokens missed and what to do about it, pools."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sglang_hybrid.engine.doctor.installation import Finding

ADVICE = {
    "never_seen": "new text; what changes, such as a date or a name, belongs behind what is shared",
    "in_flight": "asked for while another request computed it; send one request of a batch first",
    "kv_evicted": "more KV: --max-total-tokens, --mem-fraction-static (GPU), --hybrid-cpu-memory-gb (CPU)",
    "state_evicted": "more states: --max-mamba-cache-size, --mamba-full-memory-ratio, --hybrid-cpu-memory-gb (CPU)",
    "refused": "states ran out while it was computed: fewer --max-running-requests, or --max-mamba-cache-size",
    "branch_pending": "mark where the shared prefix ends: cache_control in chats, cache_boundaries elsewhere, "
    "or --hybrid-seed-prefixes",
    "below_granularity": "ends of prompts, shorter than the checkpoint grid; nothing to do",
    "disabled": "the request asks for logprobs of its prompt; leave out logprob_start_len",
    "segment_cold": "new documents; send them once before they are needed",
    "segment_evicted": "more memory for segments: --hybrid-segment-memory-gb",
    "segment_refused": "more memory for segments: --hybrid-segment-memory-gb",
    "segment_short": "nothing to do, or join short segments",
    "segment_long": "split it, or a larger --chunked-prefill-size",
    "segment_ineligible": "the request asks for logprobs or hidden states of its prompt; leave that out",
    "segment_seam": "--hybrid-seam-tokens at either end of a segment; nothing to do",
}
"""By reason of `prefix.misses.REASONS`."""

_SERIES = re.compile(r"^sglang:(\w+)(?:\{(.*)\})? ([-+.\w]+)$", re.MULTILINE)
_REASON = re.compile(r'reason="(\w+)"')
_REPLICA = re.compile(r'dp_rank="(\d+)"')


def describe(page: str) -> list[Finding]:
    """One finding per line, out of a page of metrics; [] if none of them is SGLang's."""
    series = [(name, labels, float(value)) for name, labels, value in _SERIES.findall(page)]
    if not series:
        return []
    prompt, cached = _total(series, "prompt_tokens_total"), _total(series, "cached_tokens_total") or 0.0
    rate = (
        f"{100 * cached / prompt:.1f} % of {prompt:,.0f} prompt tokens came from the cache" if prompt else "no request"
    )
    return [Finding("hit rate", rate), *_misses(series), *_pool(series, "KV", "kv"), *_pool(series, "states", "mamba")]


_Series = Iterable[tuple[str, str, float]]


def _total(series: _Series, name: str) -> float | None:
    """The sum over all processes and labels; None if there is no such series."""
    values = [value for known, _, value in series if known == name]
    return sum(values) if values else None


def _misses(series: _Series) -> list[Finding]:
    found: dict[str, float] = {}
    for name, labels, value in series:
        reason = _REASON.search(labels)
        if name == "mamba_cache_miss_tokens_total" and reason:
            found[reason[1]] = found.get(reason[1], 0.0) + value
    total = sum(found.values())
    return [
        Finding(reason, f"{100 * count / total:.1f} % of the missed tokens: {ADVICE.get(reason, 'see the documents')}")
        for reason, count in sorted(found.items(), key=lambda item: -item[1])
        if count
    ]


def _pool(series: _Series, subject: str, prefix: str) -> list[Finding]:
    """The pools of each data-parallel replica. The ranks of one hold the same: the figures of one, the largest."""
    replicas: dict[str, dict[str, float]] = {}
    for name, labels, value in series:
        kind = name.removeprefix(prefix + "_").removesuffix("_tokens")
        if name == f"{prefix}_{kind}_tokens" and kind in ("used", "evictable", "available"):
            replica = _REPLICA.search(labels)
            sizes = replicas.setdefault(replica[1] if replica else "", {})
            sizes[kind] = max(value, sizes.get(kind, 0.0))
    return [
        Finding(
            subject if len(replicas) == 1 else f"{subject} of replica {rank}",
            f"{sum(sizes.values()):,.0f}: {sizes['used']:,.0f} in use by requests, {sizes['evictable']:,.0f} cached, "
            f"{sizes['available']:,.0f} free, when SGLang last counted",
        )
        for rank, sizes in sorted(replicas.items())
        if len(sizes) == 3 and sum(sizes.values())
    ]
