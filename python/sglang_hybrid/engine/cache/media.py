"""Which image is which: in a prompt SGLang puts one number, made of a hash, in place of an image's tokens.

Whatever has the same number has the same KV, states and embedding to a prefix cache, so two images must never share
one. SGLang's hash (0.5.17 to 0.5.23) is of the patches alone: a white page of 64 x 256 pixels is one of 256 x 64 to it,
though their positions differ. And up to 0.5.21 the number has 30 bits: of 5,000 cached images that begin at one token,
a new one is taken for another once in 200,000.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine import compat

_BITS = 30
"""Of the number that SGLang up to 0.5.21 puts in place of an image's tokens."""

_MOST = 2**19
"""Images whose number is remembered, 60 MB at most; no cache holds as many."""

_SMALL = 2**16
"""Elements of a tensor beside the features that is read whole; of a larger one only the shape counts."""


class Numbers:
    """Gives each hash a number of its own: its own low bits, or the next that no other hash has.

    Every rank is given the same requests in the same order, so every rank gives the same numbers.
    """

    def __init__(self, base: int, most: int = _MOST) -> None:
        self._base = base
        self._most = most
        self._hashes: dict[int, int] = {}

    def of(self, hash_: int) -> int:
        """The number in [base, base + 2^30) that stands for an item with this hash."""
        low = hash_ % 2**_BITS
        while self._hashes.get(self._base + low, hash_) != hash_:
            low = (low + 1) % 2**_BITS
        number = self._base + low
        self._hashes.pop(number, None)  # the one asked for longest ago stands first
        self._hashes[number] = hash_
        if len(self._hashes) > self._most:
            del self._hashes[next(iter(self._hashes))]
        return number

    def __len__(self) -> int:
        return len(self._hashes)


_numbers: Numbers | None = None


def identify(original: Callable[..., Any], item: Any) -> Any:
    """AROUND hook of `MultimodalDataItem.set_pad_value`: what is hashed now is hashed with its shape and grid.

    A hash that the item came with stays: it was made here before, or by somebody who is trusted to know it.
    """
    made = item.pad_value is None and item.hash is None
    result = original(item)
    if made:
        item.set_hash(_with_layout(item))
    return result


def tell_apart(result: Any, *_: Any, **__: Any) -> None:
    """AFTER hook of `MultimodalInputs.from_processor_output`: no two images of this scheduler have one number."""
    from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

    global _numbers
    if _numbers is None:
        _numbers = Numbers(MM_PAD_SHIFT_VALUE)
    for item in result.mm_items:
        if item.hash is None or getattr(item, "pad_values", None):  # from 0.5.22 on it has 248 bits
            continue
        number = _numbers.of(item.hash)
        if number != item.pad_value:
            item.pad_value = number
            result.padded_input_ids = None  # made with the other number; SGLang makes it again


def weights_change(*_: Any, **__: Any) -> None:
    """BEFORE hook of what every update of weights begins with: images are encoded anew, by the new ones.

    SGLang flushes KV and states, and goes on with what the old encoder made of an image that it has seen.
    """
    embeddings = compat.image_embeddings()
    if embeddings is not None:
        embeddings.clear()


def _with_layout(item: Any) -> int:
    """64 bits of the item's hash, modality, shapes, and whatever else its processor gave the model beside features."""
    digest = hashlib.blake2b(item.hash.to_bytes(16, "big"), digest_size=8)
    digest.update(repr(item.modality).encode())
    for features in (item.feature, item.precomputed_embeddings):
        digest.update(_layout(features).encode())
    for name, value in sorted(item.model_specific_data.items()):
        digest.update(f"{name} {_content(value)}".encode())
    return int.from_bytes(digest.digest(), "big")


def _layout(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{' '.join(map(_layout, value))}]"
    return f"{tuple(getattr(value, 'shape', ()))} {getattr(value, 'dtype', type(value).__name__)}"


def _content(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{' '.join(map(_content, value))}]"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if hasattr(value, "tolist") and math.prod(value.shape) <= _SMALL:
        return f"{_layout(value)} {value.tolist()}"
    return _layout(value)
