"""Token sequences as int32 arrays: validation and comparison."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.errors import ConfigError

Tokens: TypeAlias = npt.NDArray[np.int32]
TOKEN_BYTES = 4
_INT32 = np.dtype(np.int32)
_INT32_MAX = 2**31 - 1


def as_tokens(tokens: npt.ArrayLike | Sequence[int]) -> Tokens:
    """`tokens` as a contiguous one-dimensional int32 array, without a copy where it already is one.

    Raises ConfigError for other shapes, non-integers, and ids outside [0, 2**31).
    """
    array = np.asarray(tokens)
    plain = array.dtype is _INT32 and array.ndim == 1 and array.flags.c_contiguous
    if plain and array.size and array.item(array.argmin()) >= 0:  # a third of the price of `min`, which is Python
        return array
    if array.ndim != 1:
        raise ConfigError(f"pass tokens as a one-dimensional array, this has shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise ConfigError(f"pass tokens as integers, this has dtype {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > _INT32_MAX:
        raise ConfigError(f"token ids must lie in [0, 2**31): {int(array.min())}..{int(array.max())}")
    return np.ascontiguousarray(array, dtype=np.int32)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens `a` and `b` share."""
    n = min(a.size, b.size)
    if n == 0 or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
