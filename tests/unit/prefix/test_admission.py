"""Admission policies: which positions of a prefill get a checkpoint."""

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.admission import ADMISSIONS, AllChunks, BranchAndEnd, EveryN, Judicious, Prefill
from sglang_hybrid.prefix.history import Sighting
from sglang_hybrid.prefix.mark import Kind, Mark


def prefill(**changes: object) -> Prefill:
    values: dict[str, object] = {"restart_tokens": 0, "known_tokens": 0, "input_tokens": 100, "end_tokens": 130}
    return Prefill(**(values | changes))  # type: ignore[arg-type]


def seen(tokens: int, branch: bool, *marks: tuple[int, Kind]) -> Sighting:
    known = tuple((at, Mark(kind, 0.0)) for at, kind in marks)
    return Sighting(tokens, known, Mark(Kind.BRANCH, 0.0) if branch else None, Mark(Kind.FRESH, 0.0))


def test_every_n_takes_whole_blocks_and_the_end() -> None:
    assert EveryN(32).positions(prefill()) == [32, 64, 96, 128, 130]
    assert EveryN(32).positions(prefill(restart_tokens=64)) == [96, 128, 130]
    assert AllChunks(64).positions(prefill()) == [64, 128, 130]
    with pytest.raises(ConfigError):
        EveryN(0)


def test_marconi_takes_the_branch_point_and_the_last_token() -> None:
    assert BranchAndEnd().positions(prefill()) == [130]
    assert BranchAndEnd().positions(prefill(known_tokens=40)) == [40, 130]
    assert BranchAndEnd().positions(prefill(known_tokens=40, restart_tokens=40)) == [130]
    assert BranchAndEnd().positions(prefill(known_tokens=100)) == [130]  # the whole input was known: no branch in it


def test_judicious_sees_a_branch_whose_kv_is_gone() -> None:
    assert Judicious().positions(prefill(sighting=seen(40, True))) == [40, 130]


def test_judicious_takes_shared_positions_again_but_no_superseded_ends() -> None:
    sighting = seen(90, True, (20, Kind.BRANCH), (50, Kind.SUPERSEDED), (70, Kind.DECLARED))
    assert Judicious().positions(prefill(sighting=sighting)) == [20, 70, 90, 130]
    assert Judicious().positions(prefill(sighting=sighting, restart_tokens=20)) == [70, 90, 130]


def test_judicious_takes_declared_boundaries_at_first_sight() -> None:
    assert Judicious().positions(prefill(boundaries=(60,), sighting=seen(0, False))) == [60, 130]


def test_judicious_refuses_what_adds_less_than_a_few_tokens() -> None:
    assert Judicious(16).positions(prefill(known_tokens=5)) == [130]
    assert Judicious(16).positions(prefill(known_tokens=40, restart_tokens=30)) == [130]
    assert Judicious(16).positions(prefill(known_tokens=46, restart_tokens=30)) == [46, 130]


@pytest.mark.parametrize("name", ADMISSIONS)
def test_positions_are_ascending_and_computed_by_the_pass(name: str) -> None:
    for restart in (0, 31, 100, 129):
        asked = prefill(restart_tokens=restart, known_tokens=min(100, restart + 20), boundaries=(10, 100))
        positions = ADMISSIONS[name]().positions(asked)
        assert positions == sorted(set(positions))
        assert all(restart < at <= 130 for at in positions)
        assert positions[-1] == 130
