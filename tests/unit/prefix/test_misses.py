"""Every prompt token that was computed has exactly one reason."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.misses import REASONS, attribute
from sglang_hybrid.prefix.request import NO_LIMIT, Request
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens

SPEC = ModelSpec("serving", 256, 4096, 1000.0, 1.0)

counts = st.integers(0, 400)


def misses(
    prompt: int, hit: int, known: int = 0, seen: int = 0, in_flight: int = 0, lost: int = 0, refused: int = 0,
    kept: int = -1, grid: int = 1, limit: int = NO_LIMIT,
) -> dict[str, int]:  # fmt: skip
    request = Request("", 0.0, prompt, hit, known, as_tokens([]), Mark(Kind.FRESH, 0.0))
    request.seen_tokens, request.in_flight_tokens, request.kept_tokens = seen, in_flight, kept
    request.lost_tokens, request.refused_tokens = lost, refused
    return attribute(request, grid, step=grid, limit=limit)


@given(counts, counts, counts, counts, counts, counts, counts, counts, st.sampled_from([1, 16, 64]), counts)
def test_reasons_add_up(
    prompt: int,
    hit: int,
    known: int,
    seen: int,
    in_flight: int,
    lost: int,
    refused: int,
    kept: int,
    grid: int,
    limit: int,
) -> None:
    hit = min(hit, prompt)
    found = misses(prompt, hit, known, seen, in_flight, lost, refused, kept, grid, limit)
    assert sum(found.values()) == prompt - hit
    assert set(found) <= set(REASONS)
    assert all(count > 0 for count in found.values())


def test_what_a_request_resumed_from_or_saved_was_cached() -> None:
    """Its end falls on no state, so what it leaves behind by ending is nothing."""
    prompt = as_tokens(range(700))
    for hit, states in ((0, [640]), (640, [])):
        decisions = Decisions(SPEC)
        first = decisions.arrive("a", prompt, 0.0, hit, hit)
        decisions.saved(first, states)
        decisions.finish(first, as_tokens(range(708)), 1.0, 0)
        again = decisions.arrive("b", prompt, 2.0, 0, 0)  # the cache was flushed, or all of it evicted
        assert attribute(again, 64, step=64) == {"kv_evicted": 640, "below_granularity": 60}


def test_what_nobody_had_before_was_never_seen() -> None:
    assert misses(700, 0) == {"never_seen": 700}


def test_an_exact_repeat_misses_only_what_the_grid_leaves() -> None:
    assert misses(700, 640, known=700, seen=700, grid=64) == {"below_granularity": 60}


def test_a_branch_without_a_state_is_pending() -> None:
    found = misses(548, 0, known=448, seen=448, grid=64)
    assert found == {"never_seen": 100, "branch_pending": 448}


def test_an_evicted_state_explains_the_tokens_up_to_it() -> None:
    found = misses(548, 64, known=448, seen=448, lost=320, grid=64)
    assert found == {"never_seen": 100, "state_evicted": 256, "branch_pending": 128}


def test_a_refused_state_explains_the_tokens_up_to_it() -> None:
    found = misses(548, 0, known=448, seen=448, refused=448, grid=64)
    assert found == {"never_seen": 100, "refused": 448}


def test_evicted_kv_and_running_requests() -> None:
    found = misses(600, 0, known=0, seen=512, in_flight=256, grid=64)
    assert found == {"never_seen": 88, "in_flight": 256, "kv_evicted": 256}


def test_what_was_never_kept_lies_below_the_granularity() -> None:
    found = misses(370, 256, known=256, seen=339, kept=256, grid=64)
    assert found == {"never_seen": 31, "below_granularity": 83}


def test_what_a_request_may_not_take_from_the_cache_is_disabled() -> None:
    assert misses(50, 0, seen=40, limit=0) == {"never_seen": 10, "disabled": 40}
    found = misses(700, 256, known=300, seen=700, grid=64, limit=300)
    assert found == {"below_granularity": 44, "disabled": 400}


def test_a_lost_state_of_its_own_end_is_told_to_the_same_prompt_again() -> None:
    decisions, whole = Decisions(SPEC), as_tokens(range(240))
    prompt = whole[:200]

    def lost(tokens: Tokens, cached: int = 0) -> int:
        return decisions.arrive("again", tokens, 9.0, cached, 200).lost_tokens

    first = decisions.arrive("a", prompt, 0.0, 0, 0)
    decisions.place(first.tip, "prompt", 192, 0.0)
    decisions.finish(first, whole, 1.0, 240)
    old = decisions.superseded(first, first.tip, 192, 1.0)
    assert old is not None
    decisions.place(old, "prompt", 192, 1.0)
    decisions.place(first.tip, "answer", 240, 1.0)
    assert lost(prompt) == 0, "it is there"
    decisions.evicted(old)
    assert lost(prompt) == lost(np.concatenate((prompt, as_tokens(range(900, 909))))) == 192
    assert lost(np.concatenate((prompt[:100], as_tokens(range(900, 909))))) == 0, "the state was of no use to it"


def test_a_lost_state_of_a_prompt_that_had_no_answer_is_told_to_it() -> None:
    decisions, prompt = Decisions(SPEC), as_tokens(range(200))
    first = decisions.arrive("a", prompt, 0.0, 0, 0)
    decisions.finish(first, prompt, 1.0, 200)
    decisions.evicted(first.tip)
    assert decisions.arrive("b", prompt, 2.0, 0, 199).lost_tokens == 200
