"""Why a prompt token was computed although a cache was there: every one of them gets exactly one reason."""

from types import MappingProxyType
from typing import NamedTuple

REASONS = MappingProxyType(
    {
        "never_seen": "no earlier request computed it at this place",
        "in_flight": "another request is computing it right now",
        "kv_evicted": "it was cached, and its KV was given up",
        "state_evicted": "a state to restart from was given up",
        "refused": "a state to restart from was not taken, for want of memory",
        "branch_pending": "its KV is cached, no state was taken there yet",
        "below_granularity": "it lies between the last position that can be restarted from and the end of the match",
        "disabled": "the request may not take it from the cache: it asks for logprobs of its prompt",
    }
)


class Seen(NamedTuple):
    """What is known of one prompt when its prefill begins; all in tokens from its start.

    `hit`: where it restarts; `known`: its KV that is cached; `seen`: what any earlier request computed; `in_flight`:
    what it shares with a request that is being computed; `lost`, `refused`: the deepest position whose state was given
    up or not taken (0: none); `kept`: how far an earlier request kept what it computed of it (-1: unknown); `grid`: the
    distance of positions that can be restarted from; `step`: the least distance of two states; `limit`: where it may
    restart at most.
    """

    prompt: int
    hit: int
    known: int = 0
    seen: int = 0
    in_flight: int = 0
    lost: int = 0
    refused: int = 0
    kept: int = -1
    grid: int = 1
    step: int = 1
    limit: int = 1 << 62


def attribute(seen: Seen) -> dict[str, int]:
    """Tokens by reason, only reasons with any; they add up to `prompt - hit`."""
    # The last token of a prompt is always computed: its logits are what was asked for.
    matched = max(seen.hit, min(max(seen.seen, seen.known), seen.prompt))
    missed = seen.prompt - matched
    disabled = max(0, matched - max(seen.hit, seen.limit))
    matched -= disabled
    reachable = max(seen.hit, min(matched, seen.prompt - 1) // seen.grid * seen.grid)
    if 0 <= seen.kept < reachable:
        reachable = max(seen.hit, min(seen.known, reachable), seen.kept)
    known = min(max(seen.known, seen.hit), reachable)
    lost = min(max(seen.lost, seen.hit), known)
    refused = min(max(seen.refused, lost), known)
    in_flight = min(max(seen.in_flight, known), reachable)
    pending = known - refused if known - refused >= seen.step else 0
    return _positive(
        {
            "never_seen": missed,
            "in_flight": in_flight - known,
            "kv_evicted": reachable - in_flight,
            "state_evicted": lost - seen.hit,
            "refused": refused - lost,
            "branch_pending": pending,
            "below_granularity": matched - reachable + known - refused - pending,
            "disabled": disabled,
        }
    )


def _positive(counts: dict[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}
