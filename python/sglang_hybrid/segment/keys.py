"""What an entry is known by: in the index, and in the tokens of a prompt's key in the prefix tree.

A composed prompt is an approximation, and must never serve a prompt that is computed as a whole. In the prefix tree it
is therefore keyed by other ids: codes of the segment stand in place of the first tokens of its interior, whether it is
reused, made, or finds no room and is computed as plain text: a next turn cannot know that. All that follows hangs below
these codes. So a second turn over the same context finds it, the exact prefix before the first segment is shared, and
nothing else ever meets it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

DIGEST_BYTES = 16
CODES = 3
"""Ids that stand for a segment: together 93 bits of its key."""
_CODE_BIT = 1 << 31
"""Above every token id. A code has 32 bits, as SGLang's hashes of pages and the events of its cache want of an id."""

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


def codes(key: Key) -> array[int]:
    """The `CODES` ids (int64) that stand for a reused interior in the prefix tree; no token has one of them."""
    found = int.from_bytes(key, "little")
    return array("q", ((found >> 31 * n) % _CODE_BIT + _CODE_BIT for n in range(CODES)))
