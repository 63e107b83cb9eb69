"""`--disaggregation-enable-kv-checksum` on a CPU: what arrived is what left, byte for byte.

SGLang computes a sum over the pages and the state of a prompt before it sends them, and again before the first decode
step. Its own kernel needs CUDA.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch

_NOT_ZERO = 1 << 32
"""SGLang takes a sum of 0 for none."""


def compute(computer: Any, kv_pages: torch.Tensor, state_slots: torch.Tensor | None = None) -> int:
    """CRC-32 of the KV pages `kv_pages` ([n] int64) in every layer's buffers, and of the state `state_slots` ([1])."""
    checksum = 0
    pages = kv_pages.tolist()
    for address, size in zip(computer._kv_data_ptrs, computer._kv_item_lens, strict=True):
        checksum = _over(address, size, pages, checksum)
    slots = [] if state_slots is None else state_slots.tolist()
    for address, size in zip(computer._state_data_ptrs, computer._state_item_lens, strict=True):
        checksum = _over(address, size, slots, checksum)
    return checksum | _NOT_ZERO


def _over(address: int, size: int, items: list[int], checksum: int) -> int:
    for item in items:
        checksum = zlib.crc32((ctypes.c_char * size).from_address(address + item * size), checksum)
    return checksum
