"""States and convolution windows of candidates: each follows its parent's, and the accepted ones are committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.engine.cpu.speculation.trees import parents_of


def follow(
    committed: Tensor,
    parents: Tensor | None,
    nodes: int,
    advance: Callable[[int, Tensor], Any],
    kept_as: torch.dtype | None = None,
) -> tuple[list[Any], Tensor]:
    """Compute nodes in their order, each from what its parent left behind.

    committed: [requests, ...], what node 0 starts from; parents: [requests, nodes], -1 for none, None for chains.
    `advance(node, before)` takes a copy [requests, ...] it may write to, changes it into what the node leaves, and
    returns the node's output. Returns the outputs and [requests, nodes, ...] of what nodes leave, rounded to `kept_as`
    as a pool of that type would between two tokens.
    """
    dtype = committed.dtype if kept_as is None else kept_as
    left = torch.empty(committed.shape[0], nodes, *committed.shape[1:], dtype=dtype)
    outputs, requests = [], torch.arange(committed.shape[0])
    for node in range(nodes):
        if node == 0:
            before = committed.clone()
        elif parents is None:
            before = left[:, node - 1].to(committed.dtype, copy=True)
        else:
            parent = parents[:, node].long()
            before = left[requests, parent.clamp(min=0)].to(committed.dtype)
            rootless = parent < 0
            if rootless.any():
                before[rootless] = committed[rootless]
        outputs.append(advance(node, before))
        left[:, node] = before
    return outputs, left


def windows(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Sequence[int],
    intermediate_conv_window: Tensor,
    intermediate_state_indices: Tensor,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Convolve candidates x [requests, channels, nodes], each behind its parent; float32, before any activation.

    Windows of candidates go to rows of intermediate_conv_window [rows, nodes, channels, width - 1]; the pool is not
    written. retrieve_parent_token [requests, nodes] is filled: the recurrence behind this convolution reads it.
    """
    requests, _, nodes = x.shape
    parents = None
    if retrieve_next_token is not None and retrieve_next_sibling is not None:
        parents = parents_of(retrieve_next_token[:requests], retrieve_next_sibling[:requests])
        if retrieve_parent_token is not None:
            retrieve_parent_token[:requests].copy_(parents)
    taps = weight.float()

    def advance(node: int, window: Tensor) -> Tensor:
        seen = torch.cat([window, x[:, :, node : node + 1].to(window.dtype)], -1)
        window.copy_(seen[..., 1:])
        out = (seen.float() * taps).sum(-1)
        return out if bias is None else out + bias.float()

    committed = conv_state.index_select(0, torch.tensor(slots).clamp_(min=0))
    outputs, left = follow(committed, parents, nodes, advance)
    intermediate_conv_window[intermediate_state_indices[:requests].long(), :nodes] = left
    return torch.stack(outputs, 1).mT  # laid out as SGLang hands x over, and reads the result


def commit(
    caches: Any,
    slots: Tensor,
    steps: Tensor,
    track_slots: Tensor | None,
    track_steps: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """REPLACE hook of scatter_mamba_states_after_mtp_verify.

    What node steps[request] left goes to slots[request] of the pools [layers, slots, ...], and, where a checkpoint is
    due, what node track_steps[request] left to track_slots[request]. A negative step or slot is none. A request's
    candidates are in row src_indices_raw[request], which 0.5.23 says; before it is the request's place in the batch.
    """
    pools = [pair for pair in zip(caches.conv, caches.intermediate_conv_window, strict=True) if pair[0].numel()]
    if caches.temporal.numel():
        pools.append((caches.temporal, caches.intermediate_ssm))
    rows = list(range(len(slots))) if src_indices_raw is None else src_indices_raw.tolist()
    for destinations, nodes in ((slots, steps), (track_slots, track_steps)):
        if destinations is None or nodes is None:
            continue
        triples = zip(rows, destinations.tolist(), nodes.tolist(), strict=False)
        moves = [triple for triple in triples if min(triple) >= 0]
        if moves:
            row, slot, node = map(list, zip(*moves, strict=True))
            for pool, left in pools:
                pool[:, slot] = left[:, row, node].to(pool.dtype)
