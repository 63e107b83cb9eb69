"""Every Prometheus series of ours: name, kind, labels, unit and meaning. docs/metrics.md shows this table."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

EVENTS = MappingProxyType(
    {
        "boundaries": "cache boundaries that requests declared",
        "bad_boundaries": "requests whose declared boundaries could not be read, and were served without",
        "hints": "requests that said what follows upon them",
        "bad_hints": "requests whose hints could not be read, and were served without",
        "breakpoints_lost": "cache breakpoints of chat requests whose content the prompt does not have",
        "planned": "states that were to be saved inside prefills",
        "written": "states that were saved inside prefills",
        "refused": "states that were wanted inside prefills and got no slot",
        "reclaimed": "slots of states in the making that went to requests that needed them to run",
        "states_evicted": "states that left the device",
        "match_given_up": "matches that were dropped for want of a slot for the request's copy of the state",
        "waited_for_states": "times a request gave its slot back and went on waiting",
        "sessions_dropped": "streaming sessions that gave up what they kept, for a request that waited for memory",
        "restore_given_up": "matches in host memory that were dropped for want of device memory",
        "bad_segments": "requests whose segments could not be read, and were served as plain text",
        "segments_lost": "marks of segments that became plain text: the prompt has nothing of them, or special tokens",
        "segments_ignored": "requests whose custom_params name segments, on a server without",
        "segments_hits": "segments that requests reused",
        "segments_made": "segments that were computed by themselves, and kept",
        "segments_fetched": "segments that another server computed or had, and sent to this one",
        "segments_handed_out": "segments that this server sent to another one",
        "segments_evicted": "segments that were given up for others",
        "segments_refused": "segments that were not kept, for what else is kept is worth more",
        "segments_dropped": "segments that were dropped: the cache was emptied, or somebody asked for it",
        "segments_reused_tokens": "tokens of prompts that reused segments stood for",
    }
)
"""Values of the label `event`."""

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Series:
    """One series. `name` is what Prometheus stores; `labels` come behind those that SGLang gives its own series."""

    name: str
    kind: Kind
    unit: str
    text: str
    labels: tuple[str, ...] = ()


ELASTIC = "sglang:elastic_memory_"
"""Prefix of the series of elastic memory."""

POOLS = ("kv", "state", "segment")
CALLS = ("map", "unmap", "grow")
"""Values of the label `kind`: who holds granules, and what is done with them (`grow`: a column more of a pool)."""


def _elastic(name: str, kind: Kind, unit: str, text: str, *labels: str) -> Series:
    return Series(ELASTIC + name + "_total" * (kind == "counter"), kind, unit, text, labels)


MISS_TOKENS = Series(
    "sglang:mamba_cache_miss_tokens_total", "counter", "tokens", "Prompt tokens computed, by reason.", ("reason",)
)
MISS_REQUESTS = Series(
    "sglang:mamba_cache_miss_requests_total", "counter", "requests", "Requests with a computed token, by reason.",
    ("reason",),
)  # fmt: skip
CACHE_EVENTS = Series(
    "sglang:mamba_cache_events_total", "counter", "events", "What the cache did, or could not do.", ("event",)
)

SERIES: tuple[Series, ...] = (
    MISS_TOKENS,
    MISS_REQUESTS,
    CACHE_EVENTS,
    _elastic("granule_bytes", "gauge", "bytes", "Size of a granule, the unit in which memory changes hands."),
    _elastic("granules_budget", "gauge", "granules", "The budget of KV and states, and of segments, together."),
    _elastic("granules_pinned", "gauge", "granules", "What the padding slots of all pools hold for good."),
    _elastic("granules_used", "gauge", "granules", "Granules with a page in use, cached ones among them.", "kind"),
    _elastic("granules_unused", "gauge", "granules", "Granules that a pool has mapped and that are empty.", "kind"),
    _elastic("fragmentation", "gauge", "share", "Free pages in used granules, of all pages in them.", "kind"),
    _elastic("granules_resident", "gauge", "granules", "Granules that are memory of the machine or card right now."),
    _elastic("granules_at_hand", "gauge", "granules", "Resident granules that were made ahead of need."),
    _elastic("granules_used_max", "gauge", "granules", "Most that were used since the start."),
    _elastic("granules_resident_max", "gauge", "granules", "Most that were resident since the start."),
    _elastic("transfers", "counter", "granules", "Granules that one pool gave up for another."),
    _elastic("evictions", "counter", "evictions", "Evictions that freed a page for want of memory.", "kind"),
    _elastic("waits", "counter", "times", "Times a request or a chunk of a prompt waited for memory."),
    _elastic("reclaims", "counter", "times", "Times memory was there once torch gave back what it kept."),
    _elastic("calls", "counter", "calls", "Calls that changed mappings.", "kind"),
    _elastic("granules_moved", "counter", "granules", "Granules of those calls.", "kind"),
    _elastic("failures", "counter", "calls", "Those calls that failed: the machine or card had no memory.", "kind"),
    _elastic("seconds", "counter", "seconds", "Time in those calls.", "kind"),
    _elastic("seconds_p50", "gauge", "seconds", "Median of those calls since the start.", "kind"),
    _elastic("seconds_p99", "gauge", "seconds", "99th percentile of those calls since the start.", "kind"),
    _elastic("processor_seconds_p99", "gauge", "seconds", "99th percentile of their processor time.", "kind"),
)
