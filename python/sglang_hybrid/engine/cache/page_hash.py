"""Names of pages without a compiler.

SGLang compiles its hash of tokens when the first prompt needs it: no request runs meanwhile, for ten seconds and more,
and a scheduler ends on an image without g++ and OpenSSL's headers. The names are the same here.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from types import ModuleType
from typing import Any

import numpy as np

from sglang_hybrid.routing.index import chain

_WORD = np.dtype("<u4")


def load() -> ModuleType:
    """In place of SGLang's loader: a module with `get_hash`."""
    return sys.modules[__name__]


def get_hash(
    raw_tokens: Any,
    logical_len: int,
    unit_width: int,
    is_bigram: bool,
    prior_digest: bytes | None,
    page_size: int | None,
) -> str | list[str]:
    """SHA-256, in hexadecimal, of `logical_len` units of `unit_width` tokens behind `prior_digest`, 32 bytes.

    With a `page_size`, one for each page of so many units, each behind the one before it. `raw_tokens` is an array of
    integers; the units of `is_bigram` are each token with its next one. Raises ValueError for other lengths, IndexError
    for tokens that have no 32 bits.
    """
    width = 2 if is_bigram else unit_width
    count = logical_len + 1 if is_bigram and logical_len else logical_len * unit_width
    tokens = np.asarray(raw_tokens)[:count]
    if tokens.size < count or (prior_digest is not None and len(prior_digest) != sha256().digest_size):
        raise ValueError(f"tokens or digest are too short: {tokens.size}, {prior_digest!r}")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= np.iinfo(_WORD).max:
        raise IndexError("token id does not fit in uint32")
    if is_bigram:
        tokens = np.stack([tokens[:-1], tokens[1:]], axis=1).ravel()
    packed, before = tokens.astype(_WORD).tobytes(), prior_digest or b""
    if page_size is None:
        return sha256(before + packed).hexdigest()
    if page_size <= 0:
        raise ValueError(f"a page has one unit or more: {page_size}")
    return [digest.hex() for digest in chain(packed, page_size * width * _WORD.itemsize, before)]
