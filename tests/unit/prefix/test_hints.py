"""What clients say of the time behind their requests: followed while it comes true, and never at another's cost."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.reuse import hints as module
from sglang_hybrid.prefix.reuse.classes import PLAIN_CLASSES, PRIORS
from sglang_hybrid.prefix.reuse.hints import BACK, FINAL, HINTS, LIFETIME, NO_HINTS, SETS, Hints, hint_classes
from sglang_hybrid.prefix.reuse.table import BINS, EDGES_LIST
from sglang_hybrid.prefix.tree.tokens import as_tokens
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.trace import Trace
from sglang_hybrid.sim.workloads import parse
from tests.prompts import text

MODEL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)


def test_every_hint_has_a_class_of_its_own() -> None:
    said = [Hints(final=True), *[Hints(back_in_s=2.0**n - 1) for n in range(11)]]
    ends = [hint_classes(hints, tenant)[0] for tenant in range(SETS) for hints in said]
    marks = [hint_classes(Hints(lifetime_s=s), tenant)[1] for tenant in range(SETS) for s in (300, 3600, 86_400)]
    assert sorted(ends + marks) == list(range(1, SETS * HINTS + 1))
    assert len(PRIORS) == PLAIN_CLASSES + SETS * HINTS
    assert hint_classes(Hints(), 0) == (0, 0)
    assert hint_classes(Hints(final=True), SETS + 2) == hint_classes(Hints(final=True), 2)
    for kind, hints in ((FINAL, said[0]), (BACK, said[3]), (LIFETIME, Hints(lifetime_s=3600.0))):
        assert module.HintTrust._judge(max(hint_classes(hints, 1))) == 3 + kind


@pytest.mark.parametrize("seconds", [3.0, 6.0, 192.0])
def test_what_is_said_to_come_back_is_expected_about_then(seconds: float) -> None:
    hazard = module.coming(seconds)
    alive = np.cumprod([1.0, *[1.0 - chance for chance in hazard]])
    before, after = (next(b for b in range(BINS) if EDGES_LIST[b + 1] >= seconds * f) for f in (0.25, 4.0))
    assert len(hazard) == BINS
    assert alive[max(before, 1)] > 0.85
    assert alive[after + 1] < 0.25
    assert all(0.0 < chance < 1.0 for chance in hazard)


def converse(
    decisions: Decisions, seed: int, says: str, turns: int = 6, namespace: str | None = None, begins: float = 0.0
) -> None:
    """A conversation whose turns are eight seconds apart; `says` what its client tells of it."""
    so_far: list[int] = []
    for turn in range(turns):
        last, now = turn == turns - 1, 100.0 * seed + begins + 8.0 * turn
        prompt = as_tokens([*so_far, *text(1000 * seed + turn, 50)])
        truth = Hints(final=True) if last else Hints(back_in_s=8.0)
        false = Hints(back_in_s=8.0) if last else Hints(final=True)
        hints = {"truth": truth, "lies": false, "always back": Hints(back_in_s=8.0), "nothing": NO_HINTS}[says]
        request = decisions.arrive("r", prompt, now, 0, 0, namespace, hints=hints)
        so_far = [*prompt.tolist(), *text(7000 * seed + turn, 20).tolist()]
        decisions.finish(request, as_tokens(so_far), now, len(so_far))


def rate(decisions: Decisions, hints: Hints, now: float, namespace: str | None = None) -> float:
    """The index value that the end of a new request with `hints` has, at an age of a second."""
    request = decisions.arrive("new", text(int(now), 80), now, 0, 0, namespace, hints=hints)
    decisions.finish(request, text(int(now), 90), now, 0)
    decisions.check()
    while decisions.table._stale:
        decisions.table.refresh()
    return float(decisions.table.index[request.tip.reuse_class, 3])


def test_true_hints_are_followed_from_the_first_one_on() -> None:
    decisions = Decisions(MODEL)
    plain, final, soon = (rate(decisions, h, 1.0 + n) for n, h in enumerate((NO_HINTS, Hints(True), Hints(False, 2.0))))
    assert final < 0.3 * plain < 0.3 * soon
    for seed in range(1, 20):
        converse(decisions, seed, "truth")
    assert min(decisions.history.trust.log_ratios) >= 0.0
    final, soon = rate(decisions, Hints(True), 5000.0), rate(decisions, Hints(False, 8.0), 5001.0)
    assert final < 0.2 * soon


def test_lies_are_learned_and_what_says_nothing_is_not_followed() -> None:
    liar, constant = Decisions(MODEL), Decisions(MODEL)
    for seed in range(1, 30):
        converse(liar, seed, "lies")
        converse(constant, seed, "always back", turns=1)  # nobody ever comes back
    assert rate(liar, Hints(True), 9000.0) > rate(liar, Hints(False, 8.0), 9001.0), "who says final comes back"
    assert rate(constant, Hints(False, 8.0), 9000.0) < 3.0 * rate(constant, NO_HINTS, 9001.0)


def test_what_one_tenant_says_is_not_held_against_another() -> None:
    alone, beside = Decisions(MODEL), Decisions(MODEL)
    for seed in range(1, 20):
        for decisions in (alone, beside):
            converse(decisions, seed, "truth", namespace="honest")
        converse(beside, seed, "always back", turns=1, namespace="liar", begins=60.0)
    honest = [rate(decisions, Hints(False, 8.0), 90_000.0, "honest") for decisions in (alone, beside)]
    assert honest[1] == pytest.approx(honest[0], rel=0.35)
    assert rate(beside, Hints(False, 8.0), 90_001.0, "liar") < 0.3 * honest[1]


def test_a_used_resume_point_is_known_by_its_uses() -> None:
    decisions, system = Decisions(MODEL), text(1, 100)
    said = Hints(lifetime_s=3600.0)
    for n in range(3):
        prompt = as_tokens([*system, *text(5 + n, 40)])
        request = decisions.arrive("r", prompt, float(n), 0, 0, None, (100,), hints=said)
        mark = request.marks[100]
        assert (mark.hint > 0) is (n == 0)
        assert request.tip.hint == 0, "the lifetime is that of the mark"
        decisions.finish(request, prompt, float(n), 0)
    assert decisions.arrive("r", text(9, 50), 4.0, 0, 0, hints=said).tip.hint > 0, (
        "without a mark it is that of the end"
    )


def served(trace: Trace, gigabytes: float) -> float:
    from sglang_hybrid.core.spec import preset

    cache = open_cache("forecast", round(gigabytes * 1e9), preset("marconi-7b"))
    found = replay(trace, cache, round(gigabytes * 1e9))
    found.check()
    return float(found.hit_tokens.sum() / trace.n_input_tokens)


@pytest.mark.parametrize(
    ("chats", "gigabytes"), [("sharegpt?seed=7&sessions=50", 1.0), ("lmsys?seed=7&sessions=40", 2.0)]
)
def test_hints_bring_hits_and_cost_none_where_they_are_wrong(chats: str, gigabytes: float) -> None:
    without, honest, half, lies = (
        served(parse(chats + more), gigabytes) for more in ("", "&hints=1", "&hints=1&wrong=0.5", "&hints=1&wrong=1")
    )
    assert honest > 1.3 * without
    assert half > without - 0.01
    assert lies > without - 0.02
