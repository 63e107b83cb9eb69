"""Reuse classes: which marks are counted together, and what is expected of them before anything was counted."""

import numpy as np
import pytest

from sglang_hybrid.prefix.classes import CLASSES, GAPS, PRIORS, gap_level, returning, reuse_class
from sglang_hybrid.prefix.mark import Kind, Mark
from sglang_hybrid.prefix.reuse import EDGES_S, ReuseTable, age_bin


def mark(kind: Kind, hits: int = 0, gap_s: float = 0.0, depth: int = 0) -> Mark:
    made = Mark(kind, 0.0)
    made.hits, made.gap_s, made.depth = hits, gap_s, depth
    return made


def test_every_class_has_a_prior_and_every_class_is_reached() -> None:
    marks = [mark(kind) for kind in Kind]
    marks += [mark(Kind.APPENDED, depth=depth) for depth in range(1, 70)]
    marks += [mark(Kind.SUPERSEDED, hits) for hits in range(4)]
    marks += [mark(Kind.BRANCH, hits, 2.0**power) for hits in (1, 2, 9) for power in range(-9, 15)]
    assert {reuse_class(one) for one in marks} == set(range(CLASSES)) == set(range(len(PRIORS)))


def test_ends_are_told_apart_by_kind_and_by_how_many_they_continue() -> None:
    depths = [reuse_class(mark(Kind.APPENDED, depth=depth)) for depth in (1, 2, 3, 4, 7, 8, 50)]
    assert depths == [depths[0], depths[1], depths[1], depths[3], depths[3], depths[5], depths[5]]
    assert len({*depths, *(reuse_class(mark(kind)) for kind in Kind)}) == 4 + len(Kind)


def test_gap_levels_double() -> None:
    assert [gap_level(gap_s) for gap_s in (-1.0, 0.0, 0.4, 0.5, 0.9, 1.0, 3.9, 4.0)] == [0, 0, 0, 1, 1, 2, 3, 4]
    assert gap_level(1e9) == GAPS - 1


@pytest.mark.parametrize(("gap_s", "gaps", "given_up"), [(0.7, 1.0, 0.5), (40.0, 3.0, 0.2)])
def test_what_came_back_is_used_again_or_given_up(gap_s: float, gaps: float, given_up: float) -> None:
    hazard = returning(gap_s, gaps, given_up)
    assert ((hazard > 0) & (hazard < 1)).all()
    at = age_bin(gap_s * 30)
    survive = np.prod(1.0 - hazard[:at])
    assert survive == pytest.approx(given_up + (1 - given_up) * (1 + EDGES_S[at] / (gaps * gap_s)) ** -gaps)
    assert hazard[age_bin(gap_s)] > 2.5 * hazard[at]  # an age of many gaps says that it was given up


def test_before_anything_is_learned_an_age_of_many_own_gaps_makes_new_ends_worth_more() -> None:
    table = ReuseTable(PRIORS)
    new = table.index[reuse_class(mark(Kind.FRESH)), 0]
    for hits in (1, 3):
        often = table.index[reuse_class(mark(Kind.BRANCH, hits, gap_s=1.0))]
        assert often[0] > new > 4 * often[age_bin(40.0)]
