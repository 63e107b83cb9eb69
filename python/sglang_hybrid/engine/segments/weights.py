"""Which weights a rank computes with: servers hand each other entries only if they have the same.

A sum over the bits of every tensor does not depend on the order in which a device adds, so equal weights have equal
sums on any; some of its numbers tell apart what a sum does not.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_SAMPLES = 64


def digest(model: torch.nn.Module) -> bytes:
    """16 bytes of the names, shapes and values of all parameters of `model`. Reads all of them once."""
    found = hashlib.blake2b(digest_size=16)
    sums, samples = list[Tensor](), list[Tensor]()
    for name, tensor in sorted(model.named_parameters(), key=lambda each: each[0]):
        found.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        if tensor.numel() and tensor.device.type != "meta":
            bits = _bits(tensor.detach())
            sums.append(bits.sum(dtype=torch.int64))
            samples.append(bits[:: max(1, bits.numel() // _SAMPLES)][:_SAMPLES].to(torch.int64))
    if sums:
        found.update(torch.stack(sums).cpu().numpy().tobytes())
        found.update(torch.cat(samples).cpu().numpy().tobytes())
    return found.digest()


def _bits(tensor: Tensor) -> Tensor:
    """Its numbers as integers [n], of four bytes where they come to that."""
    flat = tensor.reshape(-1) if tensor.dtype is not torch.bool else tensor.reshape(-1).to(torch.uint8)
    flat = flat.contiguous().view(torch.uint8)
    return flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
