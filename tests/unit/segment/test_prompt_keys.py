"""Keys of composed prompts in the prefix tree, and the way along them that is taken."""

from __future__ import annotations

import random
from array import array

import pytest

from sglang_hybrid.segment.geometry import Range
from sglang_hybrid.segment.index import REFUSED
from sglang_hybrid.segment.keys import Identity, codes
from sglang_hybrid.segment.prompt import Cached, SegmentedPrompt
from tests.unit.segment.played import an_index
from tests.unit.segment.test_prompt import FREE, SEAMS, A, run, two


def test_composed_text_is_another_key_from_its_interior_on() -> None:
    prompt = two()
    one, other = (each.key for each in prompt.segments)
    keyed = prompt.keyed(prompt.ids)
    assert [at for at in range(230) if keyed[at] != prompt.ids[at]] == [28, 29, 30, 128, 129, 130]
    assert (keyed[28:31], keyed[128:131]) == (codes(one), codes(other))
    assert prompt.ids[28] == A[8], "the prompt's own ids stay"
    assert prompt.keyed(prompt.ids[:28]) == prompt.ids[:28]
    for cut in (29, 30, 31, 40):
        assert prompt.keyed(prompt.ids[:cut]) == keyed[:cut], "a part of a key is the key of a part"
    assert prompt.keyed(prompt.ids + array("q", [7])) == keyed + array("q", [7]), "the answer hangs below it"
    second = prompt.keyed(prompt.ids, frozenset([0]))
    assert second[28] == A[8]
    assert second[128:131] == codes(other)
    assert prompt.keyed(prompt.ids, frozenset([1])) == keyed[:128] + prompt.ids[128:]
    assert prompt.keyed(prompt.ids, frozenset([0, 1])) is prompt.ids
    prompt.compose([0])
    assert prompt.keyed(prompt.ids) == second
    assert two(namespace="tenant").keyed(prompt.ids) != keyed, "tenants share nothing"


def test_the_key_says_what_was_computed() -> None:
    """Of what is cached nobody can tell later whether it is exact: the way to it does."""
    index, prompt = an_index(blocks=1), two()
    composed = prompt.keyed(prompt.ids)
    assert run(prompt, index).copies == ()
    assert [each.reason for each in prompt.segments] == [REFUSED, REFUSED]
    assert prompt.keyed(prompt.ids) is prompt.ids
    prompt.restart(index)
    assert prompt.keyed(prompt.ids) == composed, "it begins anew, with nothing decided"
    made = prompt.begin(0, 230, FREE, index, 0.0)
    assert made is not None
    assert prompt.keyed(prompt.ids) is prompt.ids
    prompt.revoke(index)
    assert prompt.keyed(prompt.ids) == composed


def test_the_cheapest_way_is_taken() -> None:
    index, prompt = an_index(), two()
    plain = (frozenset[int](), frozenset([0]), frozenset([0, 1]), frozenset([1]))
    keys = {prompt.keyed(prompt.ids, each).tobytes(): number for number, each in enumerate(plain)}

    def way(cached: dict[int, int]) -> int:
        """`cached`: tokens that are cached along the ways above."""

        def look(ids: array[int]) -> Cached:
            tokens = cached.get(keys[ids.tobytes()], 0)
            return Cached(tokens, tokens)

        return plain.index(prompt.way(prompt.ids, look, index))

    nothing: dict[int, int] = {}
    assert way(nothing) == 0, "nothing is there: all are made, for others to come"
    assert way({2: 20}) == 0
    assert way({0: 0, 1: 120, 2: 120}) == 1, "the first is cached as plain text"
    assert way({0: 128, 3: 225}) == 3, "the first is composed in the cache, the second is not"
    run(two(), index)
    assert way(nothing) == 0
    assert way({2: 20}) == 0, "the system prompt"
    assert way({0: 0, 1: 120, 2: 120}) == 1, "the first is cached as plain text"
    assert way({0: 228, 1: 120, 2: 120}) == 0, "a second turn over composed context"
    assert way({0: 20, 1: 100, 2: 100}) == 0, "the rest of A and the seams of B are more than the seams of both"
    assert way({0: 20, 1: 116, 2: 116}) == 1, "the rest of A is less than its seams"
    assert way({0: 228, 1: 225, 2: 229}) == 2
    assert way({0: 128, 3: 225}) == 3


@pytest.mark.parametrize("page", [1, 16])
def test_what_others_composed_and_computed_is_found_however_it_is_mixed(page: int) -> None:
    """Random ways of one prompt are cached; the deepest one that ends behind a segment is found, in few looks."""
    rng = random.Random(page)
    for _ in range(300):
        count = rng.randint(1, 7)
        ids, ranges = array("q"), list[Range]()
        for number in range(count):
            ids.extend([7] * rng.randint(0, 30))
            ranges.append((len(ids), len(ids) + rng.randint(20, 60)))
            ids.extend(range(1000 * number, 1000 * number + ranges[-1][1] - ranges[-1][0]))
        ids.extend([7] * 20)
        prompt = SegmentedPrompt(ids, tuple(ranges), SEAMS, Identity("model", SEAMS.head, SEAMS.tail))
        paths = [frozenset(n for n in range(count) if rng.random() < 0.5)]
        if rng.random() < 0.5:  # others went another way at its last segment
            paths.append(paths[0] ^ frozenset([count - 1]))
        lengths = [(len(ids) - 1) // page * page, (ranges[-1][1] + rng.randint(0, 10)) // page * page]
        stored = [prompt.keyed(ids, plain)[:length] for plain, length in zip(paths, lengths, strict=False)]
        looked = list[Cached]()

        def look(key: array[int], stored: list[array[int]] = stored, looked: list[Cached] = looked) -> Cached:
            known = max(common(key, each) for each in stored) // page * page
            ends = [len(each) for each in stored if key[: len(each)] == each]
            looked.append(Cached(max(ends, default=0), known))
            return looked[-1]

        found = prompt.way(ids, look, an_index())
        assert len(looked) <= 2 * count + 7
        assert look(prompt.keyed(ids, found)).tokens == lengths[0], (paths, found)


def common(one: array[int], other: array[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
