"""Token arrays: what is accepted, how prefixes compare, and that splits cannot pin dead buffers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.tree.tokens import as_tokens, common_prefix


@pytest.mark.parametrize("bad", [[-1], [1, 2**31], [[1, 2]], [0.5], ["a"], np.array([2**40]), np.array([1.0])])
def test_rejects_what_is_no_token_sequence(bad: object) -> None:
    with pytest.raises(ConfigError):
        as_tokens(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("good", [[], [0], [2**31 - 1, 0], np.arange(4, dtype=np.uint16), range(3)])
def test_accepts_integers_of_any_width(good: object) -> None:
    tokens = as_tokens(good)  # type: ignore[arg-type]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(good)  # type: ignore[call-overload]


def test_int32_is_not_copied_and_strided_views_are() -> None:
    tokens = np.arange(8, dtype=np.int32)
    assert as_tokens(tokens) is tokens
    assert as_tokens(tokens[::2]).flags.c_contiguous


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_prefix_equals_the_loop(a: list[int], b: list[int]) -> None:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    assert common_prefix(as_tokens(a), as_tokens(b)) == shared
