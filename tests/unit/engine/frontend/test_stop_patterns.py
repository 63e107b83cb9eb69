"""The bound on a stop pattern's steps is one: a backtracking matcher that fails takes no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation.limits import STOP_STEPS
from sglang_hybrid.engine.frontend.validation.stop_patterns import require_cheap, steps

TEXT = "a" * 100


def comparisons(pattern: str) -> int:
    """Characters a backtracking matcher compares from the start of `TEXT` until it succeeds or all paths failed."""
    count = 0

    def walk(items: Sequence[Any], at: int, then: Callable[[int], bool]) -> bool:
        nonlocal count
        if not items:
            return then(at)
        (operation, value), rest = items[0], items[1:]
        onward = lambda end: walk(rest, end, then)  # noqa: E731
        if operation in (_constants.LITERAL, _constants.IN):
            count += 1
            wanted = {value} if operation is _constants.LITERAL else {literal for _, literal in value}
            return at < len(TEXT) and ord(TEXT[at]) in wanted and onward(at + 1)
        if operation is _constants.SUBPATTERN:
            return walk(list(value[-1]), at, onward)
        if operation is _constants.BRANCH:
            return any(walk(list(branch), at, onward) for branch in value[1])
        least, most, inner = value

        def again(done: int, begin: int) -> bool:
            def once(end: int) -> bool:
                return (end > begin or done < least) and again(done + 1, end)

            return (done < most and walk(list(inner), begin, once)) or (done >= least and onward(begin))

        return again(0, at)

    walk(list(_parser.parse(pattern)), 0, lambda _: True)
    return count


leaves = st.sampled_from(["a", "b", "[ab]"])
repeats = st.sampled_from(["*", "+", "{2,}", "{0,3}", "{1,2}", "?", "{3}"])
patterns = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})")
        | st.tuples(inner, repeats).map(lambda two: f"(?:{two[0]}){two[1]}")
    ),
    max_leaves=6,
)


@given(patterns)
def test_no_path_is_forgotten(pattern: str) -> None:
    """As it is, and with an end that the text does not have: every path fails."""
    for each in (pattern, f"{pattern}c"):
        bound = steps(each)
        if bound <= STOP_STEPS:
            assert comparisons(each) <= bound


def test_an_endless_repeat_is_searched_in_the_tail() -> None:
    from sglang.srt.sampling import sampling_params

    assert [sampling_params.get_max_seq_length(each) for each in ("a+", "<b>.*</b>", "ab{3}")] == [512, 512, 4]


@pytest.mark.parametrize(
    "good",
    [
        r"\n\n",
        r"</answer>\s{0,8}",
        r"\d{1,16}\.",
        "(?i)stop|halt|end",
        "[.!?]",
        "^a?b$",
        r"\n+",
        "<b>.*</b>",
        r"\d+\.\d+",
        r"\s*STOP\s*",
    ],
)
def test_ordinary_patterns_are_cheap(good: str) -> None:
    require_cheap(good)
    require_cheap([good, good])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("(a+)+b", r"more than 8192 steps .* in place of \*"),
        ("(a*)*b", "in place of"),
        ("a*a*b", "in place of"),
        ("(a|a)*b", "in place of"),
        ("a?" * 30 + "b", "more than 8192 steps"),
        ("(a{1,16}){1,16}b", "more than 8192 steps"),
        ("(a|a){40}b", "more than 8192 steps"),
        ("(((a{0,60}){0,60}){0,60}){0,60}", "more than 8192 steps"),
        (r"(a)\1", "no references to groups"),
        ("(", "no regular expression"),
        ("a" * 257, "at most 256 characters: 257"),
        (["a{0,60}a{0,60}b"] * 3, "more than 8192 steps"),
        (["a"] * 33, "at most 32 patterns: 33"),
    ],
)
def test_costly_patterns_are_refused(bad: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_cheap(bad)
