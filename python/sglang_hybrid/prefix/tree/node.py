"""One edge of the hybrid radix tree and the node at its end."""

from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.tokens import TOKEN_BYTES, Tokens

_CHILDLESS: dict[int, Any] = {}


@mypyc_attr(acyclic=True)
class Node:
    """The edge `raw` (positions [start, end) of the sequence) with its KV, and the checkpoint at `end`, if any.

    `raw` holds the int32 token ids as bytes, which are compared and cut without an array each; `first` is the first id.
    `state` is the mark of the checkpoint; None means there is none. `pins` counts locks taken on this very node,
    `locks` those on it or any descendant. A node whose `parent` is None is the root or has left the tree.
    """

    __slots__ = ("children", "end", "first", "id", "last_s", "locks", "parent", "pins", "raw", "state")

    def __init__(self, node_id: int, raw: bytes, first: int, end: int, parent: "Node | None", now: float) -> None:
        self.id = node_id
        self.raw = raw
        self.first = first
        self.end = end
        self.parent = parent
        self.children: dict[int, Node] = _CHILDLESS  # most nodes are leaves; see `adopt`
        self.state: Mark | None = None
        self.pins = 0
        self.locks = 0
        self.last_s = now

    @property
    def start(self) -> int:
        """Position of the first token of the edge."""
        return self.end - len(self.raw) // TOKEN_BYTES

    @property
    def tokens(self) -> Tokens:
        """The ids of the edge, a read-only view."""
        return np.frombuffer(self.raw, dtype=np.int32)

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def adopt(self, child: "Node") -> None:
        """Enter `child` under its first token."""
        if self.children is _CHILDLESS:
            self.children = {}
        self.children[child.first] = child

    def disown(self) -> None:
        """Have no children any more."""
        self.children = _CHILDLESS

    def base(self) -> "Node":
        """The nearest proper ancestor with a checkpoint, or the root (which stands for the empty prefix)."""
        node = self.parent
        if node is None:
            return self
        while node.state is None and node.parent is not None:
            node = node.parent
        return node
