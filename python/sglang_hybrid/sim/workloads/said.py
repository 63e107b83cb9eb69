"""What clients of any workload say of the time behind a request: the truth, about the truth, or the contrary."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from sglang_hybrid.prefix.reuse.hints import Hints
from sglang_hybrid.sim.trace import TraceRequest


def said(
    rng: np.random.Generator,
    trace: Iterable[TraceRequest],
    hints: float = 1.0,
    wrong: float = 0.0,
    random: float = 0.0,
    error: float = 0.0,
) -> list[TraceRequest]:
    """The requests of `trace` in order of arrival; a share `hints` of the sessions says what follows upon each request.

    The last of a session says that it is, the others when the next one comes: with chance `wrong` that is the last, or
    after a gap of another session. With chance `random` it is what is true of any other request, which tells nothing.
    A time is off by a lognormal factor of shape `error`.
    """
    ordered = sorted(trace, key=lambda r: r.ts)
    gaps = _gaps(ordered)
    drawn = [gap for gap in gaps if gap is not None] or [0.0]
    speaks: dict[str, bool] = {}
    found = []
    for request, gap in zip(ordered, gaps, strict=True):
        chances, other, any_of = rng.random(3), float(rng.choice(drawn)), int(rng.integers(len(gaps)))
        factor = float(np.exp(rng.normal(0.0, error))) if error else 1.0
        if not speaks.setdefault(request.session, bool(chances[0] < hints)):
            found.append(request)
            continue
        back = gap
        if chances[1] < wrong:
            back = other if gap is None else None
        elif chances[2] < random:
            back = gaps[any_of]
        meant = Hints(final=True) if back is None else Hints(back_in_s=back * factor)
        found.append(replace(request, hints=meant))
    return found


def _gaps(ordered: list[TraceRequest]) -> list[float | None]:
    """Seconds from each request to the next of its session, None for the last."""
    later: dict[str, float] = {}
    gaps: list[float | None] = []
    for request in reversed(ordered):
        following = later.get(request.session)
        gaps.append(None if following is None else following - request.ts)
        later[request.session] = request.ts
    gaps.reverse()
    return gaps
