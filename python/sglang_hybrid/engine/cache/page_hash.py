"""Names of pages without a compiler.

SGLang compiles its hash of tokens when the first prompt needs it: no request runs meanwhile, for ten seconds and more,
and a scheduler ends on an image without g++ and OpenSSL's headers. The names are the same here.
"""

from __future__ import annotations

import sys
from functools import partial
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from sglang_hybrid.routing.index import chain

_WORD = np.dtype("<u4")
_WIDE = b"\xff"


def load() -> ModuleType:
    """In place of SGLang's loader: a module with `get_hash`."""
    return sys.modules[__name__]


def load_wide() -> SimpleNamespace:
    """The same for a SGLang that puts numbers of 62 bits in place of images."""
    return SimpleNamespace(get_hash=partial(get_hash, wide=True))


def get_hash(
    raw_tokens: Any,
    logical_len: int,
    unit_width: int,
    is_bigram: bool,
    prior_digest: bytes | None,
    page_size: int | None,
    wide: bool = False,
) -> str | list[str]:
    """SHA-256, in hexadecimal, of `logical_len` units of `unit_width` tokens behind `prior_digest`, 32 bytes.

    With a `page_size`, one for each page of so many units, each behind the one before it. `raw_tokens` is an array of
    integers; the units of `is_bigram` are each token with its next one. Raises ValueError for other lengths, IndexError
    for tokens that have no 32 bits or, if `wide`, 63.
    """
    width = 2 if is_bigram else unit_width
    count = logical_len + 1 if is_bigram and logical_len else logical_len * unit_width
    tokens = np.asarray(raw_tokens)[:count]
    if tokens.size < count or (prior_digest is not None and len(prior_digest) != sha256().digest_size):
        raise ValueError(f"tokens or digest are too short: {tokens.size}, {prior_digest!r}")
    most = int(tokens.max()) if tokens.size else 0
    if tokens.size and not 0 <= int(tokens.min()) <= most <= (2**63 - 1 if wide else np.iinfo(_WORD).max):
        raise IndexError(f"token id does not fit in {'int64' if wide else 'uint32'}")
    if is_bigram:
        tokens = np.stack([tokens[:-1], tokens[1:]], axis=1).ravel()
    before = prior_digest or b""
    if most > np.iinfo(_WORD).max:
        return _wide_names(tokens, None if page_size is None else page_size * width, before)
    packed = tokens.astype(_WORD).tobytes()
    if page_size is None:
        return sha256(before + packed).hexdigest()
    if page_size <= 0:
        raise ValueError(f"a page has one unit or more: {page_size}")
    return [digest.hex() for digest in chain(packed, page_size * width * _WORD.itemsize, before)]


def _wide_names(words: np.ndarray, size: int | None, digest: bytes) -> str | list[str]:
    """The same for `words` of which some have more than 32 bits, in pages of `size`.

    A page with such words has eight bytes for each, behind an odd one that no other page begins with.
    """
    if size is not None and size <= 0:
        raise ValueError(f"a page has one unit or more: {size}")
    names = []
    for start in range(0, words.size, size or words.size):
        page = words[start : start + (size or words.size)]
        narrow = int(page.max()) <= np.iinfo(_WORD).max
        digest = sha256(
            digest + (page.astype(_WORD).tobytes() if narrow else _WIDE + page.astype("<u8").tobytes())
        ).digest()
        names.append(digest.hex())
    return names[0] if size is None else names
