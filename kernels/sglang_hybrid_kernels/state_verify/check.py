"""What state_verify and promote_path accept, and what they are then called with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_hybrid_kernels.arguments import (
    INTEGERS,
    require,
    require_device,
    require_dtype,
    require_shape,
    require_slots,
)
from sglang_hybrid_kernels.compose.check import STATE_TYPES, require_matrices

TOKEN_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COMMITTED, NOTHING = -1, -2
"""Values of `parent` that are no node."""


@dataclass(frozen=True)
class Tree:
    """The arguments of one call of state_verify."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    pool: Tensor
    slots: Tensor
    parent: Tensor
    scale: float

    def check(self, check_slots: bool) -> None:
        """Raises ValueError for anything state_verify cannot do."""
        require_shape("pool", self.pool, [None] * 4)
        require_dtype("pool", self.pool, STATE_TYPES)
        require_matrices("pool", self.pool, 2)
        slots, heads, value_dim, key_dim = self.pool.shape
        require_shape("v", self.v, [None, None, heads, value_dim])
        requests, nodes = self.v.shape[:2]
        require_shape("k", self.k, [requests, nodes, None, key_dim])
        require_shape("q", self.q, self.k.shape)
        _require_groups(self.k.shape[2], heads)
        require_shape("g", self.g, [requests, nodes, heads])
        tensors = {"q": self.q, "k": self.k, "v": self.v, "g": self.g}
        if self.beta is not None:
            require_shape("beta", self.beta, [requests, nodes, heads])
            tensors["beta"] = self.beta
        require_dtype("q", self.q, (self.k.dtype,))
        for name, tensor in tensors.items():
            require_dtype(name, tensor, TOKEN_TYPES)
        require_shape("slots", self.slots, [requests])
        require_dtype("slots", self.slots, INTEGERS)
        require_device({"pool": self.pool, **tensors, "slots": self.slots, "parent": self.parent})
        _require_tree(self.parent, requests, nodes, check_slots)
        if check_slots:
            require_slots("slots", self.slots, slots)


@dataclass(frozen=True)
class Promotion:
    """The arguments of one call of promote_path."""

    pool: Tensor
    source: Tensor
    destination: Tensor
    k: Tensor
    values: Tensor
    g: Tensor
    parent: Tensor
    accepted: Tensor

    def check(self, check_slots: bool) -> None:
        """Raises ValueError for anything promote_path cannot do."""
        require_shape("pool", self.pool, [None] * 5)
        require_dtype("pool", self.pool, STATE_TYPES)
        require_matrices("pool", self.pool, 2)
        layers, slots, heads, value_dim, key_dim = self.pool.shape
        require_shape("values", self.values, [layers, None, None, heads, value_dim])
        requests, nodes = self.values.shape[1:3]
        require_shape("k", self.k, [layers, requests, nodes, None, key_dim])
        _require_groups(self.k.shape[3], heads)
        require_shape("g", self.g, [layers, requests, nodes, heads])
        tensors = {"k": self.k, "values": self.values, "g": self.g}
        for name, tensor in tensors.items():
            require_dtype(name, tensor, TOKEN_TYPES)
        require_device({"pool": self.pool, **tensors})
        _require_moves(self, requests, nodes, slots, check_slots)


@dataclass(frozen=True)
class WindowPromotion:
    """The arguments of one call of promote_window."""

    pool: Tensor
    source: Tensor
    destination: Tensor
    inputs: Tensor
    parent: Tensor
    accepted: Tensor

    def check(self, check_slots: bool) -> None:
        """Raises ValueError for anything promote_window cannot do."""
        require_shape("pool", self.pool, [None] * 4)
        layers, slots, channels, _ = self.pool.shape
        require_shape("inputs", self.inputs, [layers, None, None, channels])
        require_dtype("inputs", self.inputs, (self.pool.dtype,))
        require_device({"pool": self.pool, "inputs": self.inputs})
        _require_moves(self, *self.inputs.shape[1:3], slots, check_slots)


def _require_moves(moves: Promotion | WindowPromotion, requests: int, nodes: int, slots: int, read: bool) -> None:
    indices = {"source": moves.source, "destination": moves.destination, "accepted": moves.accepted}
    for name, index in indices.items():
        require_shape(name, index, [requests])
        require_dtype(name, index, INTEGERS)
    require_device({"pool": moves.pool, **indices, "parent": moves.parent})
    _require_tree(moves.parent, requests, nodes, read)
    if not read:
        return
    require_slots("source", moves.source, slots)
    require_slots("destination", moves.destination, slots)
    used: dict[int, int] = {}
    source, destination, accepted = (index.tolist() for index in indices.values())
    for request, node in enumerate(accepted):
        exists = node == COMMITTED or (0 <= node < nodes and int(moves.parent[request, node]) != NOTHING)
        require(exists, f"accepted must name a node, 0 to {nodes - 1}, or -1", node)
        for slot in {source[request], destination[request]} if destination[request] >= 0 else ():
            require(slot < 0 or used.setdefault(slot, request) == request, "use each slot in one request", slot)


def _require_groups(key_heads: int, heads: int) -> None:
    require(key_heads > 0 and heads % key_heads == 0, f"key heads must divide {heads} heads", key_heads)


def _require_tree(parent: Tensor, requests: int, nodes: int, read: bool) -> None:
    require_shape("parent", parent, [requests, nodes])
    require_dtype("parent", parent, INTEGERS)
    if read and parent.numel():
        own = torch.arange(nodes, device=parent.device)
        wrong = (parent < NOTHING) | (parent >= own)
        gone = parent.gather(1, parent.clamp(min=0).long()) == NOTHING
        wrong |= (parent >= 0) & ~wrong & gone
        where = wrong.nonzero()[:8].tolist()
        require(not where, "parent must be an earlier node, -1 or -2; wrong at [request, node]", where)
