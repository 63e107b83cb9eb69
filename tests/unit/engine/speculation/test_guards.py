"""A state that speculation leaves is filed as what it is, whatever was accepted, cut or still running."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.speculation import guards
from tests.unit.engine.speculation.speculating import Case, Simulation, outcome, settings

CORRECTED = tuple(map(int, compat.engine_version().split(".")[:3])) >= (0, 5, 23)
"""Whether SGLang itself has corrected what it did with 0.5.23."""


@st.composite
def cases(draw: Any) -> Case:
    strategy = draw(st.sampled_from(["no_buffer", "extra_buffer", "extra_buffer", "extra_buffer_lazy"]))
    overlaps = strategy == "extra_buffer_lazy" or (strategy == "extra_buffer" and draw(st.booleans()))
    grid = draw(st.sampled_from([4, 8, 16]))
    drafts = draw(st.integers(1, grid // 2 if overlaps else grid))
    runs = tuple(draw(st.lists(st.integers(1, drafts), min_size=1, max_size=12)))
    kept = draw(st.sampled_from([runs[-1], draw(st.integers(0, runs[-1]))]))
    prompt = draw(st.integers(1, 3 * grid))
    if draw(st.booleans()):  # the last run begins just behind a line
        prompt += -(prompt + sum(runs[:-1])) % grid + draw(st.integers(0, 2))
    return Case(
        prompt=prompt,
        runs=runs,
        kept=kept,
        grid=grid,
        drafts=drafts,
        stop=draw(st.sampled_from([0, draw(st.integers(0, max(0, kept - 1)))])),
        in_flight=draw(st.integers(1, drafts)) if overlaps else 0,
        strip=draw(st.sampled_from([False, False, True])),
        strategy=strategy,
        short=tuple(draw(st.lists(st.booleans(), max_size=6))),
    )


@hypothesis(max_examples=400, deadline=None)
@given(cases())
def test_what_is_filed_is_a_state_of_that_length(case: Case) -> None:
    named, true = outcome(case)
    assert named == true
    assert named <= (case.prompt if case.strip else case.end - case.stop + 1), "nobody resumes behind the stop"


@hypothesis(max_examples=200, deadline=None)
@given(cases())
def test_guards_cost_nothing_where_nothing_was_cut(case: Case) -> None:
    whole = replace(case, kept=case.runs[-1], stop=0, strip=False)
    assert outcome(whole) == outcome(whole, guarded=False)


FAULTS = {
    "a line noted that an earlier step crossed": (
        Case(prompt=60, runs=(6, 8), kept=2, grid=64, drafts=8, in_flight=1),
        (0, 5, 23),
    ),
    "a line in the cut tail, and one slot": (Case(prompt=60, runs=(8,) * 9, kept=2, grid=64, drafts=8), None),
    "a line in the cut tail, and a second slot came late": (
        Case(
            prompt=21,
            runs=(8, 6, 6, 7),
            kept=1,
            grid=16,
            drafts=8,
            in_flight=4,
            strategy="extra_buffer_lazy",
            short=(False, True),
        ),
        (0, 5, 23),
    ),
    "an answer kept out of the key": (
        Case(prompt=60, runs=(8, 8), kept=8, grid=64, drafts=8, strip=True),
        (0, 5, 23),
    ),
    "the live state, and a cut run": (
        Case(prompt=9, runs=(4, 4), kept=1, grid=64, drafts=4, strategy="no_buffer"),
        (0, 5, 23),
    ),
    "the live state, and an answer kept out of the key": (
        Case(prompt=9, runs=(4,), kept=4, grid=64, drafts=4, strategy="no_buffer", strip=True),
        (0, 5, 23),
    ),
}
"""Each with the version that corrected it, None for none."""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_guard_answers_a_fault_of_sglang(fault: str) -> None:
    case, corrected = FAULTS[fault]
    named, true = outcome(case)
    assert named == true
    named, true = outcome(case, guarded=False)
    assert (named == true) is (CORRECTED and corrected is not None)


def test_without_speculation_a_stripped_answer_is_no_state_of_its_prompt() -> None:
    """0.5.23 asks how much of the live state is in the key under speculation alone."""
    state = SimpleNamespace(kv_committed_len=70, mamba_pool_idx=1)
    req = SimpleNamespace(kv=state, origin_input_ids=range(40), finished_len=31)
    assert guards.fileable(req, 40, 40, buffered=False) == 0
    assert guards.fileable(req, 70, 70, buffered=False) == 70
    assert guards.fileable(req, 64, 40, buffered=True) == 0, "of the answer"
    assert guards.fileable(req, 32, 40, buffered=True) == 32, "of the prompt"


def test_a_state_whose_windows_are_ahead_of_its_recurrence_is_not_filed() -> None:
    """--enable-linear-replayssm keeps the last tokens of an answer in a ring; the windows move with every token."""
    state = SimpleNamespace(kv_committed_len=70, mamba_pool_idx=1)
    req = SimpleNamespace(kv=state, origin_input_ids=range(40), finished_len=31)
    assert guards.fileable(req, 66, 70, buffered=False) == 0, "four are in the ring"
    assert guards.fileable(req, 70, 70, buffered=False) == 70, "the ring was just emptied"


def test_two_steps_reach_two_lines_where_the_grid_is_less_than_two_drafts() -> None:
    """Why checks.py asks for more than SGLang does: the second step writes to the slot of the first."""
    close = Case(prompt=4, runs=(5,), kept=5, grid=8, drafts=8, in_flight=8)
    assert outcome(close) == (8, 16)
    assert outcome(replace(close, grid=16, prompt=12)) == (16, 16)


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer"])
def test_the_log_learns_what_the_client_saw(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(prompt=60, runs=(8, 8), kept=8, grid=64, drafts=8, stop=5, strategy=strategy)
    settings(monkeypatch, case)
    simulation = Simulation(case)
    simulation.run()
    assert simulation.filed()[0] == (64 if strategy == "extra_buffer" else 0)
    seen = 60 + 1 + 16 - 5  # the first token is the prefill's
    assert simulation.told == (seen, 64 if strategy == "extra_buffer" else 0)


@pytest.mark.parametrize(
    ("output", "stop", "skipped", "told"),
    [(9, None, False, (68, 0)), (9, 6, False, (66, 0)), (0, None, False, (24, 24)), (9, None, True, (24, 24))],
)
def test_the_log_learns_of_answers_whose_state_is_given_up(
    output: int, stop: int | None, skipped: bool, told: tuple[int, int]
) -> None:
    from sglang_hybrid.engine.cache.coordinator import CacheCoordinator
    from sglang_hybrid.engine.cache.requests import Tracked

    heard: list[tuple[int, int]] = []
    coordinator: Any = object.__new__(CacheCoordinator)
    coordinator.composer, coordinator.decisions = None, SimpleNamespace(computed=lambda rid: None)
    coordinator.finish = lambda req, record, tokens, kept: heard.append((tokens, kept))
    coordinator.cached_tokens = lambda record: 0
    req = SimpleNamespace(
        rid="r",
        finished=lambda: True,
        finished_len=stop,
        origin_input_ids=range(60),
        output_ids=range(output),
        skip_radix_cache_insert=skipped,
    )
    coordinator.ended(req, Tracked(start=24))
    assert heard == [told]


def test_an_ended_request_has_no_slot_to_write_to() -> None:
    import torch

    reqs = [SimpleNamespace(mamba_next_track_idx=at) for at in (0, None, 1)]
    batch = SimpleNamespace(reqs=reqs, mamba_track_indices=torch.tensor([5, 6, 7]))
    guards.spare_freed(None, batch)
    assert batch.mamba_track_indices.tolist() == [5, -1, 7]


def test_our_cache_is_asked_and_others_are_not() -> None:
    asked: list[Any] = []

    def original(*args: Any) -> bool:
        asked.append(args)
        return False

    other = SimpleNamespace(tree_cache=object())
    assert not guards.may_file(original, other, "req", "result", 0)
    assert asked == [(other, "req", "result", 0)]

    from sglang_hybrid.engine.cache.radix_cache import MambaRadixCache

    ours: Any = object.__new__(MambaRadixCache)
    ours.coordinator = object()
    assert guards.may_file(original, SimpleNamespace(tree_cache=ours), "req", "result", 0)
    assert len(asked) == 1
