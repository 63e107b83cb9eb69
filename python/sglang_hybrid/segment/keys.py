"""What an entry is known by: in the index, and in the tokens of a prompt's key in the prefix tree.

A composed prompt is an approximation, and must never serve a prompt that is computed as a whole. In the prefix tree it
is therefore keyed by other ids: where an interior begins stands a code of the segment in place of a token, whether it
is reused, made, or finds no room and is computed as plain text: a next turn cannot know that. All that follows hangs
below that code. So a second turn over the same context finds it, the exact prefix before the first segment is shared,
and nothing else ever meets it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

DIGEST_BYTES = 16
_CODE_BIT = 1 << 62
"""Above every token id."""

Key = bytes
"""Digest of an entry, `DIGEST_BYTES` long."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What entries depend on beside their tokens (condition C7): model, dtypes, parallel shape, rotary embedding
    (`fingerprint`), and the width of the seams (`head`, `tail`)."""

    fingerprint: str
    head: int
    tail: int

    def key(self, tokens: array[int], namespace: str | None = None) -> Key:
        """The key of a segment of `tokens` (int64) for one tenant, or for requests of one adapter: `namespace`."""
        about = repr((self.fingerprint, self.head, self.tail, namespace)).encode()
        return hashlib.blake2b(about + b"\0" + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()


def code(key: Key) -> int:
    """The id that stands for a reused interior in the prefix tree, a positive int64 that no token has."""
    return _CODE_BIT | (int.from_bytes(key[:8], "little") & (_CODE_BIT - 1))
