"""Every small prompt, every budget, every page: passes against a token-by-token reference (`played`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest

from sglang_hybrid.segment import geometry
from sglang_hybrid.segment.geometry import Range, Seams
from sglang_hybrid.segment.index import SegmentIndex
from sglang_hybrid.segment.passes import Pass
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt
from tests.unit.segment.played import Memory, Played, a_prompt, an_index

ALL = 1 << 40


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few tokens are segments."""
    monkeypatch.setattr(geometry, "LEAST_TOKENS", 1)


def every_pass(
    prompt: SegmentedPrompt, index: SegmentIndex, start: int, budget: int, most: int, page: int
) -> Iterator[Pass]:
    """The passes of a prompt of which each may run `budget` tokens, and `most` where it gets nowhere with them."""
    total = len(prompt.ids)
    while start < total:
        limits = Limits(budget, most, page)
        made = prompt.begin(start, total, limits, index, 0.0)
        if made is None:
            limits = Limits(most, most, page)
            made = prompt.begin(start, total, limits, index, 0.0)
        assert made is not None, "an empty pass gets on"
        assert made is prompt.open
        assert made.end > start
        assert 0 < made.run_tokens <= limits.tokens
        assert made.end == total or made.end % page == 0
        assert sum(row.tokens for row in made.rows) + sum(cold.tokens for cold in made.cold) == made.run_tokens
        assert prompt.commit(index) is made
        assert prompt.open is None
        yield made
        start = made.end


def play(prompt: SegmentedPrompt, index: SegmentIndex, start: int, budget: int, most: int, page: int) -> list[Pass]:
    """Run all passes of `prompt` behind `start` cached tokens, and hold them against the reference."""
    memory = Memory.of(index)
    for entry in index:
        low = next(each.interior[0] for each in prompt.segments if each.key == entry.key)
        memory.slots[entry.slots] = prompt.ids[low : low + entry.tokens]
        memory.blocks[entry.block] = entry
    played, found = Played(prompt.ids, memory).resume(start), []
    for made in every_pass(prompt, index, start, budget, most, page):
        memory.make(made, prompt.ids)
        played.run(made)
        found.append(made)
    played.ended(prompt, start)
    assert found[-1].pending is None
    prompt.end(index)
    index.blocks.check()
    assert not any(entry.pins for entry in index)
    return found


def arrangements(total: int) -> Iterator[tuple[Range, ...]]:
    """Every way to mark up to three segments in a prompt of `total` tokens."""
    every = list(combinations(range(total + 1), 2))
    yield from ((each,) for each in every)
    for first, second in combinations(every, 2):
        if second[0] >= first[1]:
            yield first, second
    for first, second, third in combinations(every[::2], 3):
        if second[0] >= first[1] and third[0] >= second[1]:
            yield first, second, third


@pytest.mark.parametrize(("width", "window"), [(0, 0), (0, 1), (1, 0), (1, 2)])
@pytest.mark.usefixtures("tiny")
def test_every_small_prompt_in_passes_of_every_size(width: int, window: int) -> None:
    seams, total, index = Seams(width, window), 7, an_index(20)
    for ranges, page in product(arrangements(total), (1, 2, 4)):
        for budget in (*range(page, total, 2), 2 * total):
            index.clear()
            play(a_prompt(range(total), ranges, seams), index, 0, budget, budget, page)
            if len(index):  # and again, with all that was made
                found = play(a_prompt(range(total), ranges, seams), index, 0, budget, budget, page)
                assert budget < 2 * total or not any(made.cold for made in found)


@pytest.mark.parametrize("width", range(17))
@pytest.mark.parametrize("window", range(4))
@pytest.mark.parametrize("page", [1, 16, 64])
def test_seams_of_every_width_at_pages_of_servers(width: int, window: int, page: int) -> None:
    """Adjacent segments, equal ones, one at 0, one that ends the prompt, one of the least length; every 7th budget."""
    seams, index = Seams(width, window), an_index()
    one, other = list(range(100, 100 + seams.least)), list(range(1000, 1097))
    parts: Sequence[tuple[list[int], bool]] = [
        (one, True), (one, True), ([1] * 5, False), (other, True), ([2] * 70, False), (other, True), (one, True),
    ]  # fmt: skip
    for parts_ in (parts, [([3], False), *parts, ([4] * 3, False)]):
        ids, ranges = list[int](), list[Range]()
        for tokens, marked in parts_:
            if marked:
                ranges.append((len(ids), len(ids) + len(tokens)))
            ids += tokens
        for budget in (*range(page, 300, 131), ALL):
            index.clear()
            first = play(a_prompt(ids, ranges, seams), index, 0, budget, max(budget, page), page)
            again = play(a_prompt(ids, ranges, seams), index, 0, budget, max(budget, page), page)
            if budget == ALL:
                assert [len(first), len(again)] == [1, 1]
                able = a_prompt(ids, ranges, seams).segments
                saved = sum(each.interior[1] - each.interior[0] for each in able if each.able)
                assert again[0].run_tokens == len(ids) - saved
                assert first[0].run_tokens == again[0].run_tokens + seams.least + len(other), "each is made once"


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.usefixtures("tiny")
def test_behind_every_cached_prefix(page: int) -> None:
    """A segment in which the cache ends is computed as plain text from there on, unless it ends in its head."""
    ids, ranges, seams, index = range(16), ((1, 7), (7, 12)), Seams(1, 1), an_index(20)
    for start, budget in product(range(0, 16, page), (4, 9, 100)):
        prompt = a_prompt(ids, ranges, seams)
        index = an_index(20)
        play(prompt, index, start, budget, max(budget, page), page)
        if budget == 100:
            assert [each.composed for each in prompt.segments] == [not 2 < start < 6, not 8 < start < 11]


@pytest.mark.usefixtures("tiny")
def test_a_pass_is_as_long_as_its_budget_allows() -> None:
    """With every entry there, what is left of a budget is less than a page."""
    seams = Seams(1, 1)
    for ranges, page in product(arrangements(8), (1, 2)):
        index = an_index(20)
        play(a_prompt(range(8), ranges, seams), index, 0, 100, 100, page)
        for budget in range(page, 8):
            prompt = a_prompt(range(8), ranges, seams)
            for made in every_pass(prompt, index, 0, budget, budget, page):
                assert made.end == 8 or made.run_tokens > budget - page
            prompt.end(index)


@pytest.mark.usefixtures("tiny")
def test_a_state_is_saved_at_the_deepest_place_that_a_pass_knows_it_at() -> None:
    ids, seams = range(12), Seams(1, 1)
    for ranges, page, window, budget in product([((0, 5),), ((2, 7), (7, 12)), ()], (1, 2, 4), (0, 1, 3), (3, 12)):
        prompt = a_prompt(ids, ranges, seams)
        for made in every_pass(prompt, an_index(20), 0, max(budget, page), 100, page):
            able = {
                at
                for row in made.rows
                for at in range(row.start + 1, row.end + 1)
                if at % page == 0
                and (at < row.end or (at == made.end and made.pending is None))
                and (at - row.start >= window or at == made.end)
            }
            for position in range(14):
                known = [at for at in able if at <= position]
                assert made.saved_at(position, page, window) == max(known, default=0)
