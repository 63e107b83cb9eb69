"""Seams, interiors, and the ranges that clients may mark."""

from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.segment.geometry import LEAST_TOKENS, MOST_SEAM, MOST_SEGMENTS, Seams, checked
from sglang_hybrid.segment.keys import CODES


@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 16, 31, 32, 200])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_the_shortest_interior_fills_the_window_and_holds_the_codes(width: int, window: int) -> None:
    seams = Seams(width, window)
    low, high = seams.interior((10, 10 + seams.least))
    assert low - 10 == seams.head >= window
    assert 10 + seams.least - high == seams.tail == width
    assert high - low >= max(window, CODES)
    assert seams.least >= LEAST_TOKENS
    assert seams.least == LEAST_TOKENS or high - low == max(window, CODES), "no longer than it has to be"


def test_widths_and_windows_have_bounds() -> None:
    assert Seams(MOST_SEAM, 0).head == MOST_SEAM
    for width in (-1, MOST_SEAM + 1):
        with pytest.raises(ConfigError, match=f"between 0 and {MOST_SEAM}: {width}"):
            Seams(width, 3)
    with pytest.raises(ConfigError, match="no fewer than 0 tokens: -1"):
        Seams(8, -1)


def test_ranges_may_touch_and_fill_the_prompt() -> None:
    assert checked([[0, 4], [4, 9]], 9) == ((0, 4), (4, 9))
    assert checked(((3, 4),)) == ((3, 4),)
    assert checked([]) == ()
    most = [[at, at + 1] for at in range(MOST_SEGMENTS)]
    assert len(checked(most, MOST_SEGMENTS)) == MOST_SEGMENTS


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (None, "must be a list of"),
        (7, "must be a list of"),
        ("[[0, 1]]", "must be a list of"),
        ({"0": 1}, "must be a list of"),
        ([7], "two whole numbers of tokens: 7"),
        (["ab"], "two whole numbers of tokens: 'ab'"),
        ([[1]], "two whole numbers of tokens"),
        ([[1, 2, 3]], "two whole numbers of tokens"),
        ([[1, 2.0]], "two whole numbers of tokens"),
        ([[True, 2]], "two whole numbers of tokens"),
        ([[None, 2]], "two whole numbers of tokens"),
        ([["x" * 500, 2]], r"\.\.\.$"),
        ([[-1, 2]], r"lie in the 9 tokens of the prompt: \[-1, 2\]"),
        ([[2, 10]], r"lie in the 9 tokens of the prompt: \[2, 10\]"),
        ([[3, 3]], r"end behind its start: \[3, 3\]"),
        ([[4, 3]], r"end behind its start: \[4, 3\]"),
        ([[0, 3], [2, 5]], r"must not overlap: \[2, 5\] after \[0, 3\]"),
        ([[4, 6], [0, 2]], r"must be in order and must not overlap: \[0, 2\] after \[4, 6\]"),
        ([[at, at + 1] for at in range(MOST_SEGMENTS + 1)], f"may mark {MOST_SEGMENTS} segments: {MOST_SEGMENTS + 1}"),
    ],
)
def test_what_a_client_gets_wrong(ranges: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(ranges, 9)


def test_the_end_of_the_prompt_may_be_unknown() -> None:
    assert checked([[5, 10**9]]) == ((5, 10**9),)
    with pytest.raises(ConfigError, match="None tokens"):
        checked([[-1, 2]])
