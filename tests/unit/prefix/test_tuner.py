"""Marconi's weight, followed online by the regret of past evictions."""

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.eviction.marconi import FlopAware
from sglang_hybrid.prefix.eviction.tuner import RegretTuner
from sglang_hybrid.prefix.tree.mark import Kind, Mark

MODEL = ModelSpec("hybrid", kv_bytes_per_token=1, checkpoint_bytes=400, flops_per_token=1.0, flops_per_token_pair=0.0)


@pytest.mark.parametrize(("victim", "rises"), [((0.0, 1.0), True), ((1.0, 0.0), False)])
def test_regret_moves_alpha_away_from_the_expert_to_blame(victim: tuple[float, float], rises: bool) -> None:
    policy = FlopAware(MODEL)
    tuner = RegretTuner(policy)
    for _ in range(10):
        mark = Mark(Kind.FRESH, 0.0)
        tuner.evicted(mark, victim)  # (recency, efficiency): a low score is a vote for eviction
        tuner.missed(mark)
    assert (policy.alpha > 1.5) is rises
    assert (policy.alpha < 0.7) is not rises


def test_regret_turns_around_after_a_phase_change() -> None:
    policy = FlopAware(MODEL)
    tuner = RegretTuner(policy)
    for victim in [(0.0, 1.0)] * 200 + [(1.0, 0.0)] * 40:
        mark = Mark(Kind.FRESH, 0.0)
        tuner.evicted(mark, victim)
        tuner.missed(mark)
    assert policy.alpha < 1.0


def test_regret_ignores_marks_it_never_evicted_and_stays_bounded() -> None:
    policy = FlopAware(MODEL)
    tuner = RegretTuner(policy, remembered=2)
    marks = [Mark(Kind.FRESH, 0.0) for _ in range(5)]
    for mark in marks:
        tuner.evicted(mark, (0.0, 0.0))
    tuner.missed(marks[0])
    tuner.missed(Mark(Kind.FRESH, 0.0))
    assert policy.alpha == 1.0
    with pytest.raises(ConfigError):
        RegretTuner(policy, remembered=0)
