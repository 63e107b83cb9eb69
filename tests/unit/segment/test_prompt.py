"""The segments of a prompt: which are reused or made, why others are computed, what becomes of revoked passes."""

from __future__ import annotations

from array import array

import pytest

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.passes import Cold, Copy, Pass, Row
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt
from tests.unit.segment.played import a_prompt, an_index

ALL = 1 << 40
FREE = Limits(ALL, ALL)
SEAMS = Seams(8, 3)
A, B = list(range(100, 200)), list(range(200, 300))
SYSTEM, QUESTION = [1] * 20, [2] * 10


def two(seams: Seams = SEAMS, namespace: str | None = None) -> SegmentedPrompt:
    """System prompt, A at 20, B at 120, question at 220."""
    return a_prompt([*SYSTEM, *A, *B, *QUESTION], [(20, 120), (120, 220)], seams, namespace)


def run(prompt: SegmentedPrompt, index: SegmentIndex, start: int = 0, now: float = 0.0) -> Pass:
    """All of `prompt` in one pass."""
    made = prompt.begin(start, len(prompt.ids), FREE, index, now)
    assert made is not None
    prompt.commit(index)
    prompt.end(index)
    return made


def test_the_first_request_makes_what_the_second_reuses() -> None:
    index = an_index()
    first = run(two(), index)
    one, other = list(index)
    assert first.cold == (Cold(one, 20, 120, (28, 112)), Cold(other, 120, 220, (128, 212)))
    assert first.rows == (Row(0, 28), Row(112, 128, one), Row(212, 230, other))
    assert first.copies == (Copy(one, 0, 28, 84, 20), Copy(other, 0, 128, 84, 120))
    assert first.run_tokens == 28 + 16 + 18 + 200
    swapped = a_prompt([*B, *A, *QUESTION], [(0, 100), (100, 200)], SEAMS)
    second = run(swapped, index, now=1.0)
    assert second.cold == ()
    assert second.rows == (Row(0, 8), Row(92, 108, other), Row(192, 210, one))
    assert second.copies == (Copy(other, 0, 8, 84, 0), Copy(one, 0, 108, 84, 100))
    assert swapped.reused_tokens == 168
    counts = index.counts
    assert (counts.made, counts.hits, counts.reused_tokens, counts.dropped) == (2, 2, 168, 0)
    assert [entry.hits for entry in index] == [1, 1]


def test_a_pass_that_ends_in_an_interior_leaves_its_jump_to_the_next() -> None:
    index = an_index()
    run(two(), index)
    prompt = two()
    one, _ = index
    first = prompt.begin(0, 230, Limits(28, 100), index, 0.0)
    assert first is not None
    assert (first.start, first.end, first.rows, first.pending) == (0, 112, (Row(0, 28),), one)
    prompt.commit(index)
    assert one.pins == 1, "its states are still to be read"
    second = prompt.begin(112, 230, Limits(16, 100), index, 0.0)
    assert second is not None
    assert second.rows == (Row(112, 128, one),)
    prompt.commit(index)
    assert one.pins == 0
    assert second.pending is not None
    assert second.pending.pins == 1
    prompt.end(index)
    assert second.pending.pins == 0


def test_what_is_short_or_ends_the_prompt_is_no_segment() -> None:
    seams = Seams(0, 0)
    prompt = a_prompt([*A[:63], *B[:64], *A], [(0, 63), (63, 127), (127, 227)], seams)
    assert [(each.able, each.reason) for each in prompt.segments] == [
        (False, "segment_short"), (True, ""), (False, "segment_short"),
    ]  # fmt: skip
    index = an_index()
    made = run(prompt, index)
    assert len(made.cold) == 1
    assert prompt.misses(0, index) == {"segment_short": 163, "segment_cold": 64}


def test_misses_tell_every_token_of_a_segment_its_reason() -> None:
    index = an_index()
    prompt = two()
    assert prompt.misses(0, index) == {"segment_seam": 32, "segment_cold": 168}, "what no pass came to is foretold"
    run(prompt, index)
    assert prompt.misses(0, index) == {"segment_seam": 32, "segment_cold": 168}
    again = two()
    assert again.misses(0, index) == {"segment_seam": 32}
    run(again, index)
    assert again.misses(0, index) == {"segment_seam": 32}
    assert again.misses(150, index) == {"segment_seam": 8}, "an interior behind the start is a hit from there on"
    assert again.behind(150) == [(150, 220)]
    forbidden = two()
    forbidden.forbid()
    run(forbidden, index)
    assert forbidden.misses(0, index) == {"segment_ineligible": 200}
    assert forbidden.keyed(forbidden.ids) is forbidden.ids


def test_what_was_kept_once_is_said_to_be_evicted() -> None:
    index = an_index(4)
    run(a_prompt([*A, *QUESTION], [(0, 100)], SEAMS), index)
    run(a_prompt([*B, *QUESTION], [(0, 100)], SEAMS), index, now=500.0)
    assert index.counts.evicted == 1
    again = a_prompt([*A, *QUESTION], [(0, 100)], SEAMS)
    run(again, index, now=1000.0)
    assert again.misses(0, index) == {"segment_seam": 16, "segment_evicted": 84}


def test_what_is_made_ahead_of_a_request_counts_as_made_for_it() -> None:
    """Once: the next one reuses it. And the history knows one request, not two of them milliseconds apart."""
    index = an_index()
    ahead = SegmentedPrompt(two().ids, ((20, 120),), SEAMS, two().identity, ahead=True)
    run(ahead, index, now=5.0)
    (entry,) = index
    assert entry.owed == "segment_cold"
    other = SegmentedPrompt(two().ids, ((20, 120),), SEAMS, two().identity, ahead=True)
    run(other, index, now=5.0)
    assert entry.owed == "segment_cold", "it is for nobody who comes ahead"
    first = two()
    assert first.begin(0, 230, Limits(0, 0), index, 6.0) is None
    run(first, index, now=6.0)
    assert first.misses(0, index) == {"segment_seam": 32, "segment_cold": 168}
    assert first.reused_tokens == 0
    assert (entry.owed, entry.mark.last_s) == (None, 5.0)
    again = two()
    run(again, index, now=7.0)
    assert again.misses(0, index) == {"segment_seam": 32}
    assert (again.reused_tokens, entry.mark.last_s) == (168, 7.0)
    index.check()


def test_what_was_made_ahead_for_a_later_pass_is_told_with_the_first() -> None:
    """And belongs to whoever came first, whatever comes in between."""
    index = an_index()
    for range_ in ((20, 120), (120, 220)):
        run(SegmentedPrompt(two().ids, (range_,), SEAMS, two().identity, ahead=True), index)
    first, other = two(), two()
    assert first.begin(0, 230, Limits(28, 100), index, 1.0) is not None
    first.commit(index)
    assert first.misses(0, index) == {"segment_seam": 32, "segment_cold": 168}
    run(other, index, now=2.0)
    assert (other.misses(0, index), other.reused_tokens) == ({"segment_seam": 32}, 168)
    while (at := first.begin(112, 230, FREE, index, 3.0)) is not None and at.end < 230:
        first.commit(index)
    first.commit(index)
    first.end(index)
    assert (first.misses(0, index), first.reused_tokens) == ({"segment_seam": 32, "segment_cold": 168}, 0)
    index.check()


def test_a_segment_that_never_found_room_is_refused() -> None:
    index = an_index(2)  # one block of states, one of KV; 84 tokens take two
    prompt = a_prompt([*A, *QUESTION], [(0, 100)], SEAMS)
    made = run(prompt, index)
    assert (made.cold, made.rows, made.composed) == ((), (Row(0, 110),), False)
    assert prompt.misses(0, index) == {"segment_refused": 100}
    assert prompt.keyed(prompt.ids) is prompt.ids, "it is exact"
    assert index.counts.refused == 1


def test_a_request_that_waits_is_seen_once() -> None:
    """A scheduler decides on a pass again and again until there is memory for it."""
    index, prompt = an_index(2), a_prompt([*A, *A, *QUESTION], [(0, 100), (100, 200)], SEAMS)
    for tick in range(50):
        prompt.begin(0, 210, FREE, index, 0.01 * tick)
        prompt.revoke(index)
    prompt.restart(index)
    run(prompt, index, now=1.0)
    mark = index.sight(prompt.segments[0].key, 100.0)
    assert (mark.hits, mark.last_s, mark.gap_s) == (1, 100.0, 100.0)
    counts = index.counts
    assert (counts.refused, counts.made, counts.dropped, counts.hits) == (2, 0, 0, 0)


def test_a_revoked_pass_leaves_nothing_behind() -> None:
    index, prompt = an_index(), two()
    for _ in range(3):
        assert prompt.begin(0, 230, FREE, index, 0.0) is not None
        assert len(index) == 2
        prompt.revoke(index)
        assert (len(index), index.blocks.free) == (0, index.blocks.count)
        assert [(each.composed, each.decided, each.reason) for each in prompt.segments] == [(True, False, "")] * 2
    assert index.counts == type(index.counts)()
    index.check()


def test_one_of_a_batch_that_is_not_run_takes_no_entry_from_the_other() -> None:
    index, maker, other = an_index(), two(), two()
    made = maker.begin(0, 230, FREE, index, 0.0)
    assert made is not None
    copies = other.begin(0, 230, FREE, index, 0.0)
    assert copies is not None
    assert copies.cold == ()
    other.revoke(index)  # no memory for it
    assert all(cold.entry.alive for cold in made.cold)
    maker.commit(index)
    assert [(entry.making, entry.alive, entry.pins) for entry in index] == [(False, True, 0)] * 2
    assert run(two(), index).cold == ()
    index.check()


def test_who_relies_on_what_is_not_made_cannot_run() -> None:
    index, maker, other = an_index(), two(), two()
    assert maker.begin(0, 230, FREE, index, 0.0)
    assert other.begin(0, 230, FREE, index, 0.0)
    maker.revoke(index)
    with pytest.raises(InvariantError, match="begins its pass anew: 0"):
        other.commit(index)
    again = other.begin(0, 230, FREE, index, 0.0)
    assert again is not None
    assert len(again.cold) == 2
    other.commit(index)
    other.end(index)
    index.clear()
    assert index.blocks.free == index.blocks.count


def test_commit_follows_upon_begin() -> None:
    with pytest.raises(InvariantError, match="decided on before: 2 segments"):
        two().commit(an_index())


@pytest.mark.parametrize("equal", [True, False])
def test_a_pass_decides_about_nothing_that_lies_behind_its_end(equal: bool) -> None:
    """Its tokens last to the second interior, but no page ends there. An equal one leaves the first its entry."""
    index, other = an_index(), A[:66] if equal else B[:66]
    prompt = a_prompt([*A[:66], *other, *QUESTION], [(0, 66), (66, 132)], Seams(30, 3))
    assert [each.interior for each in prompt.segments] == [(30, 36), (96, 102)]
    if not equal:
        run(a_prompt([*other, *QUESTION], [(0, 66)], Seams(30, 3)), index)
    made = prompt.begin(0, 142, Limits(30 + 66 + 60, ALL, 64), index, 0.0)
    assert made is not None
    assert made.end == 64
    assert [each.decided for each in prompt.segments] == [True, False]
    (cold,) = made.cold
    assert (cold.entry.alive, cold.entry.pins) == (True, 1)
    assert [entry.pins for entry in index] == ([1] if equal else [0, 1])
    prompt.commit(index)
    index.check()


def test_a_request_that_ends_takes_its_open_pass_along() -> None:
    index, prompt = an_index(), two()
    assert prompt.begin(0, 230, FREE, index, 0.0) is not None
    prompt.end(index)
    assert (prompt.open, len(index), index.blocks.free) == (None, 0, index.blocks.count)


def test_a_segment_is_made_in_a_pass_that_comes_to_it() -> None:
    """A page ends nowhere in the interior: what follows up to a page's end is part of the price."""
    seams = Seams(30, 3)
    ids = [*[3] * 10, *A[:66], *QUESTION * 20]  # interior 40 to 46, pages end at 0 and 64
    prompt, index = a_prompt(ids, [(10, 76)], seams), an_index()
    assert prompt.begin(0, len(ids), Limits(40 + 66 + 17, ALL, 64), index, 0.0) is None
    assert len(index) == 0
    made = prompt.begin(0, len(ids), Limits(40 + 66 + 18, ALL, 64), index, 0.0)
    assert made is not None
    assert (made.end, made.run_tokens, len(made.cold)) == (64, 40 + 18 + 66, 1)


@pytest.mark.parametrize("page", [1, 64, 128])
def test_what_does_not_fit_into_an_empty_pass_is_plain_text(page: int) -> None:
    index, prompt = an_index(), two(Seams(8, 3))
    start, most = 0, max(99, page)
    while start < 230:
        made = prompt.begin(start, 230, Limits(most, most, page), index, 0.0)
        assert made is not None
        assert made.run_tokens <= most
        prompt.commit(index)
        start = made.end
    reasons = [each.reason for each in prompt.segments]
    assert reasons == (["segment_long"] * 2 if page < 128 else ["segment_long", "segment_cold"])


def test_it_stays_plain_text_when_the_pass_is_decided_on_anew() -> None:
    """The scheduler asks for a shorter pass, of any number of tokens, where memory is short."""
    index, prompt = an_index(), two()
    assert prompt.begin(0, 230, Limits(99, 99), index, 0.0) is not None
    shorter = prompt.begin(0, 40, FREE, index, 0.0)
    assert shorter is not None
    assert (shorter.end, shorter.rows, shorter.cold) == (40, (Row(0, 40),), ())
    prompt.restart(index)
    anew = prompt.begin(0, 40, FREE, index, 0.0)
    assert anew is not None
    assert len(anew.cold) == 1


def test_an_entry_serves_a_segment_that_could_not_be_made_here() -> None:
    index = an_index()
    run(two(), index)
    prompt = two()
    made = prompt.begin(0, 230, Limits(50, 50), index, 0.0)
    assert made is not None
    assert [each.reason for each in prompt.segments] == ["", ""]
    assert len(made.copies) == 2


def test_equal_segments_of_a_prompt_are_made_once() -> None:
    index = an_index()
    prompt = a_prompt([*A, *A, *QUESTION], [(0, 100), (100, 200)], SEAMS)
    made = prompt.begin(0, 210, FREE, index, 0.0)
    assert made is not None
    (entry,) = index
    assert made.cold == (Cold(entry, 0, 100, (8, 92)),)
    assert [row.jump for row in made.rows] == [None, entry, entry]
    prompt.commit(index)
    assert prompt.reused_tokens == 84, "the second of them; the first is what made it"
    assert entry.pins == 0


def test_adjacent_segments_without_seams_are_jumped_one_after_the_other() -> None:
    index = an_index()
    prompt = a_prompt([*A, *B, *QUESTION], [(0, 100), (100, 200)], Seams(0, 0))
    made = run(prompt, index)
    one, other = index
    assert made.rows == (Row(100, 100, one), Row(200, 210, other))


def test_a_dropped_entry_lives_as_long_as_the_pass_that_needs_it() -> None:
    index = an_index()
    run(two(), index)
    prompt = two()
    made = prompt.begin(0, 230, FREE, index, 0.0)
    assert made is not None
    index.clear()
    assert index.blocks.free < index.blocks.count
    index.check()
    assert prompt.commit(index) is made
    assert index.blocks.free == index.blocks.count


def test_one_that_is_dropped_while_it_is_made_serves_its_own_request() -> None:
    index, prompt = an_index(), two()
    made = prompt.begin(0, 230, FREE, index, 0.0)
    assert made is not None
    index.clear()
    assert prompt.commit(index) is made
    prompt.end(index)
    assert index.blocks.free == index.blocks.count
    assert len(index) == 0


def test_names_tell_segments_where_tokens_do_not() -> None:
    identity = Identity("model", SEAMS.head, SEAMS.tail)
    hashes = array("q", range(1000, 1230))

    def named(names: tuple[int, int], ids: array[int] = hashes) -> SegmentedPrompt:
        return SegmentedPrompt(ids, ((20, 120), (120, 220)), SEAMS, identity, names=names)

    index = an_index()
    run(named((7, 8)), index)
    assert len(index) == 2
    made = run(named((8, 7), array("q", range(230))), index)
    assert made.cold == ()
    assert len(run(named((8, 9)), index).cold) == 1
