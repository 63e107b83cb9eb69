"""Why a prompt token was computed although a cache was there: every one of them gets exactly one reason."""

from collections.abc import Sequence
from types import MappingProxyType

from sglang_hybrid.prefix.request import NO_LIMIT, Request

REASONS = MappingProxyType(
    {
        "never_seen": "no earlier request computed it at this place",
        "in_flight": "another request is computing it right now",
        "kv_evicted": "it was cached, and its KV was given up",
        "state_evicted": "a state to resume from was given up",
        "refused": "a state to resume from was not taken, for want of memory",
        "branch_pending": "its KV is cached, no state was taken there yet",
        "below_granularity": "it lies between the last position that can be resumed from and the end of the match",
        "disabled": "the request may not take it from the cache: it asks for logprobs of its prompt",
        "segment_cold": "its segment is new here: computed by itself, and kept for later",
        "segment_evicted": "its segment was kept, and given up for others",
        "segment_refused": "what else is kept is worth more than its segment, which was computed as plain text",
        "segment_short": "its segment is too short to be worth a reuse",
        "segment_long": "its segment does not fit into one prefill pass",
        "segment_ineligible": "the request may reuse no segment: it asks for logprobs or hidden states of its prompt",
        "segment_seam": "it lies at an end of its segment, which is computed with every use",
    }
)


def attribute(
    request: Request, grid: int = 1, step: int = 1, limit: int = NO_LIMIT, segments: Sequence[tuple[int, int]] = ()
) -> dict[str, int]:
    """Prompt tokens that `request` computes, by reason, only reasons with any.

    It could have resumed at multiples of `grid` tokens up to `limit` only, and no two states lie closer than `step`.
    Tokens in the ranges [start, end) of `segments` are left out: they have reasons of their own.
    """
    hit, prompt = request.cached_tokens, request.prompt_tokens
    # The last token of a prompt is always computed: its logits are what was asked for.
    matched = max(hit, min(max(request.seen_tokens, request.kv_tokens), prompt))
    enabled = matched - max(0, matched - max(hit, limit))
    reachable = max(hit, min(enabled, prompt - 1) // grid * grid)
    if 0 <= request.kept_tokens < reachable:
        reachable = max(hit, min(request.kv_tokens, reachable), request.kept_tokens)
    known = min(max(request.kv_tokens, hit), reachable)
    lost = min(max(request.lost_tokens, hit), known)
    refused = min(max(request.refused_tokens, lost), known)
    in_flight = min(max(request.in_flight_tokens, known), reachable)
    ends = (
        ("state_evicted", lost),
        ("refused", refused),
        ("branch_pending" if known - refused >= step else "below_granularity", known),
        ("in_flight", in_flight),
        ("kv_evicted", reachable),
        ("below_granularity", enabled),
        ("disabled", matched),
        ("never_seen", prompt),
    )
    found: dict[str, int] = {}
    start = hit
    for reason, end in ends:
        elsewhere = sum([max(0, min(end, b) - max(start, a)) for a, b in segments]) if segments else 0
        found[reason] = found.get(reason, 0) + end - start - elsewhere
        start = end
    return {reason: count for reason, count in found.items() if count}
