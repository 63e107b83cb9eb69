"""What a grid says, in words: one paragraph per trace and model, of figures that were computed and no others."""

from collections.abc import Iterable, Sequence

from sglang_hybrid.sim.grid import CEILINGS
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.segments.options import SUFFIX

ENOUGH = 0.95
"""The knee is the smallest capacity with this share of what endless memory gives."""


def paragraph(outcomes: Sequence[Outcome]) -> str:
    """The answer for outcomes of one trace and one model; empty without a policy among them."""
    outcomes = [o for o in outcomes if not o.policy.endswith(SUFFIX)]  # `segments.words` tells of those
    policies = [o for o in outcomes if o.policy not in CEILINGS]
    if not policies:
        return ""
    endless = next((o.token_hit_rate for o in outcomes if o.policy == "unbounded"), None)
    if endless == 0.0:
        return "No request begins like an earlier one: there is nothing to reuse, whatever the memory and the policy."
    capacities = sorted({o.capacity_gb for o in policies})
    best = {gb: _best(o for o in policies if o.capacity_gb == gb) for gb in capacities}
    knee = None
    sentences = []
    if endless is None:
        sentences.append("The knee is known when the ceilings are computed: leave out --no-ceilings.")
    else:
        knee = _first(capacities, best, endless)
        serves = f"would serve {_percent(endless)} of the input tokens from cache."
        sentences += [f"Endless memory, with a state at every position, {serves}"]
        sentences += [_knee(knee, capacities, best)]
    sentences += [_winners(best), _more(capacities, best, endless)]
    at = capacities[-1] if knee is None else knee
    sentences += [_above([o for o in outcomes if o.capacity_gb == at]), _split(best[at][0])]
    return " ".join(sentence for sentence in sentences if sentence)


def _first(capacities: list[float], best: dict[float, list[Outcome]], most: float) -> float | None:
    return next((gb for gb in capacities if best[gb][0].token_hit_rate >= ENOUGH * most), None)


def _best(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The policies with the highest hit rate; alike is what prints alike."""
    ranked = sorted(outcomes, key=lambda o: -o.token_hit_rate)
    return [o for o in ranked if _percent(o.token_hit_rate) == _percent(ranked[0].token_hit_rate)]


def _knee(knee: float | None, capacities: list[float], best: dict[float, list[Outcome]]) -> str:
    most = capacities[-1]
    if knee is None:
        if best[most][0].fields.get("all_fits"):  # a cache that saves states where a server does gets no more
            enough = _first(capacities, best, best[most][0].token_hit_rate)
            return f"Memory for all that is saved gives {_rate(best[most])}; {enough:g} GB is enough for 95 % of that."
        return f"No capacity tried gives 95 % of that; the largest, {most:g} GB, gives {_rate(best[most])}."
    least = ", the smallest one tried," if knee == capacities[0] else ""
    return f"{knee:g} GB{least} is enough for 95 % of that: it gives {_rate(best[knee])}."


def _winners(best: dict[float, list[Outcome]]) -> str:
    at: dict[tuple[str, ...], list[str]] = {}
    for gb, outcomes in best.items():
        at.setdefault(tuple(sorted(o.policy for o in outcomes)), []).append(f"{gb:g}")
    parts = [f"{_and(names)}{' alike' if len(names) > 1 else ''} at {_and(gbs)} GB" for names, gbs in at.items()]
    return f"Best policy: {'; '.join(parts)}."


def _more(capacities: list[float], best: dict[float, list[Outcome]], endless: float | None) -> str:
    """Whether memory beyond the largest capacity helps, from what was evicted there."""
    most = capacities[-1]
    winner = best[most][0]
    left = None if endless is None else round(100 * endless, 1) - round(100 * winner.token_hit_rate, 1)
    if winner.fields.get("all_fits"):
        said = f"At {most:g} GB {winner.policy} evicts nothing: more memory brings nothing."
        if left is not None and left >= 0.1 and winner.fields.get("states"):
            said += (
                f" The other {left:.1f} points lie behind the last checkpoint, or are prefixes at whose end no state "
                "was saved; declared boundaries (cache_boundaries) save states there."
            )
        return said
    if left is None:
        return ""
    if left < 0.1:
        return "More memory than that brings nothing."
    said = f"More memory than {most:g} GB can bring at most {left:.1f} points."
    if len(capacities) > 1:
        before = capacities[-2]
        gain = 100 * (winner.token_hit_rate - best[before][0].token_hit_rate)
        said = f"From {before:g} to {most:g} GB the best hit rate moves by {gain:+.1f} points. {said}"
    return said


def _above(outcomes: list[Outcome]) -> str:
    rate = {o.policy: o.token_hit_rate for o in outcomes if o.policy in CEILINGS}
    parts = []
    if "clairvoyant" in rate:
        parts.append(f"a cache that knows the future gets {_percent(rate['clairvoyant'])}")
    if "bound" in rate:
        parts.append(f"no cache can get more than {_percent(rate['bound'])}")
    return f"At {outcomes[0].capacity_gb:g} GB {', and '.join(parts)}." if parts else ""


def _split(winner: Outcome) -> str:
    states, kv = winner.fields.get("states_gb"), winner.fields.get("kv_gb")
    if states is None or kv is None or not states + kv:
        return ""
    return (
        f"At the end of the trace {winner.policy} holds {winner.fields['states']:,} states of {states:.2f} GB "
        f"together and {kv:.2f} GB of KV: states are {100 * states / (states + kv):.0f} % of the bytes."
    )


def _rate(outcomes: list[Outcome]) -> str:
    return f"{_percent(outcomes[0].token_hit_rate)} with {_and([o.policy for o in outcomes])}"


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
