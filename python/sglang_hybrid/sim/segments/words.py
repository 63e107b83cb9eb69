"""What rows of segments say, in words: of figures that were computed and no others."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.segments.options import SUFFIX

WORTH_SAYING = 0.001


def words(outcomes: Sequence[Outcome]) -> str:
    """The answer for outcomes of one trace and one model; empty without rows of segments that a server could have."""
    known = {(o.capacity_gb, o.policy): o for o in outcomes}
    rows = [o for o in outcomes if o.policy.endswith(SUFFIX) and o.policy not in _CEILINGS]
    if not rows:
        return ""
    first = rows[0].fields
    said = [
        f"Segments: {first['marking_requests']:,} of {first['requests']:,} requests mark "
        f"{first['segments_marked']:.1f} each, reused with seams of {first['seam_tokens']} tokens."
    ]
    for row in rows:
        plain = known.get((row.capacity_gb, row.policy.removesuffix(SUFFIX)))
        said.append(_row(row, plain))
    for name, where in _CEILINGS.items():
        found = [o for o in outcomes if o.policy == name]
        if found:
            most = max(found, key=lambda o: o.capacity_gb)
            at = where.format(gb=f"{most.capacity_gb:g}")
            said.append(f"{at} {_share(most)} are saved, and {_kept(most)} are kept.")
    return " ".join([*said, "An answer over reused segments is an approximation (docs/segments.md)."])


_CEILINGS = {
    "clairvoyant" + SUFFIX: "At {gb} GB, with segments evicted by knowledge of the future,",
    "unbounded" + SUFFIX: "With endless memory",
}


def _row(row: Outcome, plain: Outcome | None) -> str:
    gb, its, policy = row.capacity_gb, row.fields["segments_gb"], row.policy.removesuffix(SUFFIX)
    said = f"At {gb:g} GB, {its:g} of them for segments, {policy} would have saved {_share(row)} of the prefill FLOPs"
    if plain is None:
        return f"{said}: {_kept(row)} were kept."
    if row.fields["flop_hit_rate"] - plain.fields["flop_hit_rate"] < WORTH_SAYING:
        return f"{said}, no more than the {_share(plain)} without."
    return f"{said} instead of {_share(plain)}: {_kept(row)} were kept."


def _share(outcome: Outcome) -> str:
    return f"{100 * outcome.fields['flop_hit_rate']:.1f} %"


def _kept(outcome: Outcome) -> str:
    return f"{outcome.fields['segments_kept']:.1f} of {outcome.fields['segments_marked']:.1f} segments a request"
