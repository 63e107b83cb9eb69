"""Refusals are trusted as far as they prove right, and nothing is remembered for ever."""

from sglang_hybrid.prefix.duel import CAUTION, Duels
from sglang_hybrid.prefix.mark import Kind, Mark


def marks(n: int) -> list[Mark]:
    return [Mark(Kind.APPENDED, 0.0) for _ in range(n)]


def test_without_evidence_a_new_entry_is_hardly_refused() -> None:
    assert Duels().margin == CAUTION


def test_rivals_used_first_earn_full_trust_and_new_entries_used_first_take_it_back() -> None:
    duels = Duels()
    for made, rival in zip(marks(30), marks(30), strict=True):
        duels.pair(made, rival, 1.0, 1.0)
        duels.used(rival)
        duels.used(made)  # decided already
    assert duels.margin == 1.0
    for made, rival in zip(marks(60), marks(60), strict=True):
        duels.pair(made, rival, 1.0, 1.0)
        duels.used(made)
    assert duels.margin == CAUTION
    duels.check()


def test_a_dense_entry_weighs_more_than_a_thin_one() -> None:
    thin, dense = Duels(), Duels()
    for duels, density in ((thin, 0.01), (dense, 1.0)):
        for made, rival in zip(marks(30), marks(30), strict=True):
            duels.pair(made, rival, 1.0, density)
            duels.used(rival)
    assert thin.margin == CAUTION < dense.margin


def test_old_pairs_are_forgotten_from_both_sides() -> None:
    duels, (popular, *made) = Duels(remembered=5), marks(21)
    for one in made:
        duels.pair(one, popular, 1.0, 1.0)
        duels.check()
    before = duels.margin
    for one in made[:15]:
        duels.used(one)
    assert duels.margin == before


def test_a_pair_of_one_mark_or_without_value_says_nothing() -> None:
    duels, (one, other) = Duels(), marks(2)
    duels.pair(one, one, 1.0, 1.0)
    duels.pair(one, other, 0.0, 0.0)
    duels.used(one)
    duels.check()
    assert duels.margin == CAUTION
