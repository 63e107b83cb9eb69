"""Every prompt token that was computed has exactly one reason."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.prefix.misses import REASONS, Seen, attribute

counts = st.integers(0, 400)


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
    found = attribute(Seen(prompt, hit, known, seen, in_flight, lost, refused, kept, grid, step=grid, limit=limit))
    assert sum(found.values()) == prompt - hit
    assert set(found) <= set(REASONS)
    assert all(count > 0 for count in found.values())


def test_what_nobody_had_before_was_never_seen() -> None:
    assert attribute(Seen(700, 0)) == {"never_seen": 700}


def test_an_exact_repeat_misses_only_what_the_grid_leaves() -> None:
    assert attribute(Seen(700, 640, known=700, seen=700, grid=64, step=64)) == {"below_granularity": 60}


def test_a_branch_without_a_state_is_pending() -> None:
    found = attribute(Seen(548, 0, known=448, seen=448, grid=64, step=64))
    assert found == {"never_seen": 100, "branch_pending": 448}


def test_an_evicted_state_explains_the_tokens_up_to_it() -> None:
    found = attribute(Seen(548, 64, known=448, seen=448, lost=320, grid=64, step=64))
    assert found == {"never_seen": 100, "state_evicted": 256, "branch_pending": 128}


def test_a_refused_state_explains_the_tokens_up_to_it() -> None:
    found = attribute(Seen(548, 0, known=448, seen=448, refused=448, grid=64, step=64))
    assert found == {"never_seen": 100, "refused": 448}


def test_evicted_kv_and_running_requests() -> None:
    found = attribute(Seen(600, 0, known=0, seen=512, in_flight=256, grid=64, step=64))
    assert found == {"never_seen": 88, "in_flight": 256, "kv_evicted": 256}


def test_what_was_never_kept_lies_below_the_granularity() -> None:
    found = attribute(Seen(370, 256, known=256, seen=339, kept=256, grid=64, step=64))
    assert found == {"never_seen": 31, "below_granularity": 83}


def test_what_a_request_may_not_take_from_the_cache_is_disabled() -> None:
    assert attribute(Seen(50, 0, seen=40, limit=0)) == {"never_seen": 10, "disabled": 40}
    found = attribute(Seen(700, 256, known=300, seen=700, grid=64, step=64, limit=300))
    assert found == {"below_granularity": 44, "disabled": 400}
