"""Why a prompt token was computed although a cache was there: every one of them gets exactly one reason."""

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
    }
)


def attribute(request: Request, grid: int = 1, step: int = 1, limit: int = NO_LIMIT) -> dict[str, int]:
    """Prompt tokens that `request` computes, by reason, only reasons with any.

    It could have resumed at multiples of `grid` tokens up to `limit` only, and no two states lie closer than `step`.
    """
    hit, prompt = request.cached_tokens, request.prompt_tokens
    # The last token of a prompt is always computed: its logits are what was asked for.
    matched = max(hit, min(max(request.seen_tokens, request.kv_tokens), prompt))
    missed = prompt - matched
    disabled = max(0, matched - max(hit, limit))
    matched -= disabled
    reachable = max(hit, min(matched, prompt - 1) // grid * grid)
    if 0 <= request.kept_tokens < reachable:
        reachable = max(hit, min(request.kv_tokens, reachable), request.kept_tokens)
    known = min(max(request.kv_tokens, hit), reachable)
    lost = min(max(request.lost_tokens, hit), known)
    refused = min(max(request.refused_tokens, lost), known)
    in_flight = min(max(request.in_flight_tokens, known), reachable)
    pending = known - refused if known - refused >= step else 0
    return _positive(
        {
            "never_seen": missed,
            "in_flight": in_flight - known,
            "kv_evicted": reachable - in_flight,
            "state_evicted": lost - hit,
            "refused": refused - lost,
            "branch_pending": pending,
            "below_granularity": matched - reachable + known - refused - pending,
            "disabled": disabled,
        }
    )


def _positive(counts: dict[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}
