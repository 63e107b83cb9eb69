"""Reuse classes: which marks are counted together, and what is expected of them before anything was counted."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.reuse.classes import (
    GAPS,
    PLAIN_CLASSES,
    PRIORS,
    ROOMS,
    gap_level,
    returning,
    reuse_class,
    room,
)
from sglang_hybrid.prefix.reuse.table import EDGES_S, ReuseTable, age_bin
from sglang_hybrid.prefix.tree.mark import FIRST, LATER, NEAR, Kind, Mark
from sglang_hybrid.sim import open_cache, replay
from sglang_hybrid.sim.workloads import generate


def mark(kind: Kind, hits: int = 0, gap_s: float = 0.0, depth: int = 0, room: int = 0, site: int = 0) -> Mark:
    made = Mark(kind, 0.0)
    made.hits, made.gap_s, made.depth, made.room, made.site = hits, gap_s, depth, room, site
    return made


def test_every_class_has_a_prior_and_every_class_is_reached() -> None:
    marks = [mark(kind) for kind in Kind]
    marks += [mark(Kind.DECLARED, site=site) for site in (FIRST, LATER, NEAR)]
    marks += [mark(Kind.APPENDED, depth=depth) for depth in range(1, 70)]
    marks += [mark(Kind.APPENDED, depth=1, room=level) for level in range(ROOMS + 1)]
    marks += [mark(Kind.SUPERSEDED, hits) for hits in range(4)]
    marks += [mark(Kind.BRANCH, hits, 2.0**power) for hits in (1, 2, 9) for power in range(-9, 15)]
    assert {reuse_class(one) for one in marks} == set(range(PLAIN_CLASSES))


def test_ends_are_told_apart_by_kind_and_by_how_many_they_continue() -> None:
    depths = [reuse_class(mark(Kind.APPENDED, depth=depth)) for depth in (1, 2, 3, 4, 7, 8, 50)]
    assert depths == [depths[0], depths[1], depths[1], depths[3], depths[3], depths[5], depths[5]]
    assert len({*depths, *(reuse_class(mark(kind)) for kind in Kind)}) == 4 + len(Kind)


def test_the_end_of_a_full_context_is_a_class_of_its_own() -> None:
    ends = (Kind.FRESH, Kind.APPENDED, Kind.DIVERGED)
    assert {reuse_class(mark(kind, depth=depth, room=2)) for kind in ends for depth in (0, 1, 30)} == {
        PLAIN_CLASSES - 2
    }
    for kind in (Kind.BRANCH, Kind.DECLARED, Kind.SUPERSEDED):
        assert reuse_class(mark(kind, room=2)) == reuse_class(mark(kind))
    assert reuse_class(mark(Kind.APPENDED, hits=1, gap_s=3.0, room=2)) == reuse_class(mark(Kind.APPENDED, 1, 3.0))


def test_how_much_of_the_context_is_left() -> None:
    ends = (0, 14_000, 15_360, 15_361, 15_872, 16_128, 16_384, 20_000)
    assert [room(end, 16_384) for end in ends] == [0, 0, 1, 1, 2, 3, 3, 3]
    assert [room(end, 0) for end in ends] == [0] * len(ends)


def test_knowing_the_context_pays_where_conversations_fill_it() -> None:
    known, capacity_bytes = preset("marconi-7b"), 8_000_000_000
    trace = generate("agentic", 3, sessions=40)
    skipped = []
    for model in (known, replace(known, context_tokens=0)):
        cache = open_cache("forecast", capacity_bytes, model)
        skipped.append(int(replay(trace, cache, capacity_bytes).hit_tokens.sum()))
    assert skipped[0] > 1.02 * skipped[1]


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
