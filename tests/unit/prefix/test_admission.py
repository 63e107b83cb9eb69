"""Admission policies: at which positions of a request a state is saved."""

import random
from itertools import pairwise

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.admission import (
    ANYWHERE,
    AdmissionPolicy,
    EveryN,
    HistoryAdmission,
    MarconiAdmission,
    Places,
    keeps_end,
    places,
    reachable,
)
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.tokens import as_tokens


def asked(
    policy: AdmissionPolicy, *earlier: tuple[int, Kind], start: int = 0, end: int = 130, kv: int = 0, seen: int = 0,
    boundaries: tuple[int, ...] = (),
) -> list[int]:  # fmt: skip
    """Positions in a prompt of 100 tokens and an answer up to `end`; `seen` tokens came before, and part there."""
    request = Request("", 0.0, 100, start, kv, as_tokens([]), Mark(Kind.FRESH, 0.0), boundaries)
    request.seen_tokens = seen
    request.branch = Mark(Kind.BRANCH, 0.0) if seen else None
    request.earlier = tuple((at, Mark(kind, 0.0)) for at, kind in earlier)
    return policy.positions(request, start, end, kv)


def test_every_n_takes_whole_blocks_and_the_end() -> None:
    assert asked(EveryN(32)) == [32, 64, 96, 128, 130]
    assert asked(EveryN(32), start=64) == [96, 128, 130]
    assert asked(EveryN(64)) == [64, 128, 130]
    with pytest.raises(ConfigError):
        EveryN(0)


def test_marconi_takes_the_branch_point_and_the_last_token() -> None:
    assert asked(MarconiAdmission()) == [130]
    assert asked(MarconiAdmission(), kv=40) == [40, 130]
    assert asked(MarconiAdmission(), kv=40, start=40) == [130]
    assert asked(MarconiAdmission(), kv=100) == [130]  # the whole prompt was known: no branch in it


def test_judicious_sees_a_branch_whose_kv_is_gone() -> None:
    assert asked(HistoryAdmission(), seen=40) == [40, 130]


def test_judicious_takes_shared_positions_again_but_no_superseded_ends() -> None:
    earlier = (20, Kind.BRANCH), (50, Kind.SUPERSEDED), (70, Kind.DECLARED)
    assert asked(HistoryAdmission(), *earlier, seen=90) == [20, 70, 90, 130]
    assert asked(HistoryAdmission(), *earlier, seen=90, start=20) == [70, 90, 130]


def test_judicious_takes_declared_boundaries_at_first_sight() -> None:
    assert asked(HistoryAdmission(), boundaries=(60,)) == [60, 130]


def test_judicious_refuses_what_adds_less_than_a_few_tokens() -> None:
    assert asked(HistoryAdmission(16), seen=5) == [130]
    assert asked(HistoryAdmission(16), seen=40, start=30) == [130]
    assert asked(HistoryAdmission(16), seen=46, start=30) == [46, 130]


@pytest.mark.parametrize("name", POLICIES)
def test_positions_are_ascending_and_computed_by_the_pass(name: str) -> None:
    for start in (0, 31, 100, 129, 130):
        kv = min(100, start + 20)
        positions = asked(POLICIES[name].admission(), start=start, kv=kv, seen=kv, boundaries=(10, 100))
        assert positions == sorted(set(positions))
        assert all(start < at <= 130 for at in positions)
        assert positions[-1:] == ([130] if start < 130 else [])


def test_a_pass_saves_at_the_deepest_position_of_the_grid_that_its_kernels_have() -> None:
    assert reachable(100, 0, 300, grid=64, step=1, page=1) == 64
    assert reachable(100, 10, 300, grid=1, step=1, page=1) == 100
    assert reachable(100, 10, 300, grid=1, step=64, page=1) == 74
    assert reachable(200, 10, 300, grid=64, step=64, page=16) is None  # 74, 138: no end of a page among them
    assert reachable(200, 10, 300, grid=64, step=64, page=1) == 138, "off the grid, as SGLang's own states are then"
    assert reachable(200, 32, 300, grid=128, step=32, page=1) == 128
    assert reachable(300, 10, 300, grid=1, step=64, page=1) == 300, "the state behind a pass is always there"
    assert reachable(301, 0, 300, grid=1, step=1, page=1) is None
    assert reachable(5, 0, 300, grid=1, step=1, page=1) is None, "shorter than a window of the convolution"
    assert reachable(10, 10, 300, grid=1, step=1, page=1) is None


def test_of_a_prompt_in_chunks_the_pass_saves_that_has_the_last_position_of_the_grid() -> None:
    for end, passes in ((400, [None, None, 384, None]), (448, [None, None, 384, None]), (500, [None, None, None, 448])):
        chunks = pairwise([0, 128, 256, 384, end])
        assert [reachable(end - 1, *chunk, grid=64, step=1, page=1) for chunk in chunks] == passes
    assert reachable(499, 100, 200, grid=64, step=1, page=1) is None, "a later one can"


def test_what_the_next_pass_is_too_short_to_save_is_saved_before() -> None:
    for end, wanted_at in ((130, [{64: 129}, {}]), (230, [{}, {164: 229}, {}]), (290, [{}, {}, {264: 289}])):
        chunks = pairwise([*range(0, end, 100), end])
        assert [places([end - 1], *chunk, grid=64, step=64, page=1) for chunk in chunks] == wanted_at


def test_the_end_of_a_chunk_is_kept_where_slots_are_to_spare_and_nothing_planned_is_near() -> None:
    assert keeps_end(64, False, True, True, 64, True)
    assert not keeps_end(63, False, True, True, 64, True)
    assert not keeps_end(64, False, True, True, 64, False)


def test_the_end_of_a_prompt_is_kept_unless_it_costs_a_copy_beside_a_planned_one() -> None:
    assert keeps_end(1, True, False, False, 64, False)
    assert keeps_end(1, True, True, True, 64, False)
    assert not keeps_end(1, True, True, False, 64, True)


def test_without_a_grid_the_state_behind_the_prompt_does_not_stand_for_the_one_before_its_last_token() -> None:
    """Mamba-2 with no_buffer, whose last chunk has no state inside it."""
    for end, size, step, wanted_at in (
        (333, 100, 128, [{}, {}, {300: 332}, {}]),
        (2248, 2048, 256, [{2048: 2247}, {}]),
        (2348, 2048, 256, [{}, {2304: 2347}]),
    ):
        chunks = pairwise([*range(0, end, size), end])
        assert [places([end - 1], *chunk, grid=1, step=step, page=1) for chunk in chunks] == wanted_at


def test_a_last_chunk_shorter_than_a_window_leaves_the_repeat_what_the_chunk_before_has() -> None:
    """Kernels with a state at any token, LFM2's for one; with a grid, where chunks begin off it."""
    assert places([699], 616, 693, grid=1, step=1, page=1) == {693: 699}
    assert places([699], 693, 700, grid=1, step=1, page=1) == {}
    assert places([701], 616, 693, grid=1, step=1, page=1) == {}, "the last chunk has it"
    assert places([325], 216, 316, grid=64, step=1, page=1) == {256: 325}
    assert places([385], 216, 316, grid=64, step=1, page=1) == {}, "the last chunk has 384"


@pytest.mark.parametrize("seed", range(200))
def test_a_state_stands_for_a_prefix_if_no_pass_that_resumes_at_it_saves_one_nearer(seed: int) -> None:
    rng = random.Random(seed)
    grid = rng.choice((1, 8, 64))
    where = Places(grid, rng.choice((1, 8, 64, 96)), rng.choice((1, grid)))
    start = rng.randrange(300) if rng.random() < 0.5 else rng.randrange(5) * grid
    for at in range(start, start + 300):
        nearer = any(places([at], start, end, *where) for end in range(at + 1, at + 3))
        assert where.stands(start, at) is not nearer
    assert not any(where.stands(start, at) for at in range(start))


def test_where_the_step_is_not_known_a_state_stands_for_what_lies_in_its_grid() -> None:
    assert [at for at in range(300) if Places(64).stands(128, at)] == list(range(128, 192))
    assert [at for at in range(300) if ANYWHERE.stands(128, at)] == [128]
