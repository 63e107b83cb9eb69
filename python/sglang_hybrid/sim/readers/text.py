"""A tokenizer for traces that carry text when no tokenizer is at hand: pieces of at most six letters, hashed.

About four characters a token, deterministic across machines, and prefix-stable when messages are cut one by one, which
is what a prefix cache cares about. Token *counts* are therefore estimates; hit rates hardly depend on them.
"""

import re
import zlib

import numpy as np

from sglang_hybrid.sim.trace import Tokens

_PIECE = re.compile(r"\s?\w{1,6}|[^\w\s]|\s+")


def tokenize(text: str) -> Tokens:
    """int32 token ids, one per piece of `text`; the empty text gives none."""
    pieces = _PIECE.findall(text)
    ids = (zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF for piece in pieces)
    return np.fromiter(ids, dtype=np.int32, count=len(pieces))


def count_words(text: str) -> int:
    """Words as a typist counts them: runs of spaces plus one, none in blank text."""
    return len(text.split())
