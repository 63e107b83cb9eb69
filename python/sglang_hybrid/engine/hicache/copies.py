"""A second tier in ordinary memory: what HiCache needs of an accelerator, as copies between two tensors.

On a CPU the "device" pools and the host pools are the same memory. The tier is real all the same: its pools are of
their own size, entries move between them, and a request that comes back is served from the second one. SGLang's streams
and events for the CPU do nothing, so every copy is done when the call returns.

Host pools are page first, [pages, layers, page_size, ...] per tensor; device pools are [slots, ...] per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

IO_BACKEND, LAYOUT = "direct", "page_first_direct"
"""The only pair whose transfers take plain tensors and whose layout both kinds of pool have."""

RESERVE_BYTES = 1 << 30
"""What a host pool leaves to the operating system; SGLang's 10 GiB are those of a machine with an accelerator."""


def load_layer(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of the host slots `src_indices`, whole pages, to the device slots `dst_indices`."""
    pages = src_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[pages, layer_id].reshape(-1, *device.shape[1:])


def back_up_layers(
    src_ptrs: Sequence[Tensor], dst_ptrs: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Copy the device slots `src_indices` of every layer to the host slots `dst_indices`, whole pages.

    `src_ptrs` are the layers for the first of `dst_ptrs`, then those for the second: keys, then values.
    """
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for at, device in enumerate(src_ptrs):
        host, layer = dst_ptrs[at // layers], at % layers
        host[pages, layer] = device[src_indices].reshape(-1, *host.shape[2:])


def without_registration(buffer: Tensor, registration_granularity_bytes: int | None = None) -> None:
    """REPLACE hook of `_cuda_host_register`, which locks pages for the accelerator's copies."""
