"""Which server computes which cold segments of one prompt, by the paces that were seen and the work that waits."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_hybrid.engine.frontend.segments.peers import Offer, Peer
from sglang_hybrid.segment.dispatch import shared_out

WORTH_TOKENS = 512
"""Fewer cold tokens are computed sooner than others are asked."""
PATIENCE_S, LEAST_PATIENCE_S = 30.0, 1.0
_PATIENCE = 4
"""Times what was expected."""

Segments = dict[str, list[int]]
"""Token ids by the segment's name."""


@dataclass(frozen=True, slots=True)
class Share:
    """The `segments` that `peer` computes, None for this server; it was `idle`, so that its pace is seen."""

    peer: Peer | None
    segments: Segments
    idle: bool

    def without(self, names: Container[str]) -> Share:
        return replace(self, segments={each: some for each, some in self.segments.items() if each not in names})


@dataclass(frozen=True, slots=True)
class Plan:
    """What each server does, and in how many seconds all is there, 0 where nobody can tell."""

    shares: list[Share]
    seconds: float

    @property
    def patience(self) -> float:
        """Seconds after which nobody waits for any of it."""
        return max(LEAST_PATIENCE_S, _PATIENCE * self.seconds) if self.seconds else PATIENCE_S


def worth(segments: Mapping[str, Sequence[int]]) -> bool:
    """Whether it pays to ask others for them."""
    return sum(map(len, segments.values())) >= WORTH_TOKENS


def planned(
    cold: Segments, offers: Sequence[tuple[Peer, Offer]], names: Sequence[str], pace: float | None, waiting: int
) -> Plan | None:
    """Who computes which of `cold`; None if this server alone, of which `pace` and `waiting` tokens are known, is as
    quick. Offers are of the segments `names`, those of `cold` among them."""
    sizes = [len(some) for some in cold.values()]
    own = pace or 1.0  # before anything was measured tokens are counted, as the paper does
    costs, waits, idle = [[own * size for size in sizes]], [own * waiting], [not waiting]
    for peer, offer in offers:
        there = {name for name, held in zip(names, offer.held, strict=True) if held}
        its = (peer.pace.value or offer.pace or own) if pace else 1.0
        way = (peer.transfer.value or 0.0) if pace else 0.0
        costs.append([size * (way if each in there else its) for each, size in zip(cold, sizes, strict=True)])
        waits.append(its * offer.waiting + ((peer.way.value or 0.0) if pace else 0.0))
        idle.append(not offer.waiting and there.isdisjoint(cold))
    found = shared_out(costs, waits)
    if found is None:
        return None
    assigned, seconds = found
    shares = [
        Share(peer, {each: cold[each] for each, who in zip(cold, assigned, strict=True) if who == at}, idle[at])
        for at, peer in enumerate([None, *(peer for peer, _ in offers)])
        if at in assigned
    ]
    return Plan(shares, seconds if pace else 0.0)
