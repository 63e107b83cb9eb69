"""A flat, picklable copy of a cache's tree, for replays from the state the cache was in."""

from typing import NamedTuple

import numpy as np

from sglang_hybrid.prefix.tree.check import walk
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.radix_tree import RadixTree
from sglang_hybrid.prefix.tree.tokens import Tokens


class SavedMark(NamedTuple):
    """A checkpoint: the sequence it lies on, its position there, and what its mark remembers."""

    sequence: int
    position: int
    kind: Kind
    hits: int
    last_s: float
    touch: int


class Snapshot(NamedTuple):
    """Every leaf's whole sequence, and every checkpoint once."""

    sequences: tuple[Tokens, ...]
    marks: tuple[SavedMark, ...]


def save(tree: RadixTree) -> Snapshot:
    """The present content of `tree`, without locks and slots."""
    sequences: list[Tokens] = []
    marks: dict[int, SavedMark] = {}
    for leaf in walk(tree):
        if not leaf.is_leaf:
            continue
        edges = []
        node: Node = leaf
        while node.parent is not None:
            edges.append(node.tokens)
            mark = node.state
            if mark is not None and node.id not in marks:
                marks[node.id] = SavedMark(len(sequences), node.end, mark.kind, mark.hits, mark.last_s, mark.touch)
            node = node.parent
        sequences.append(np.concatenate(edges[::-1]))
    return Snapshot(tuple(sequences), tuple(marks.values()))


def load(tree: RadixTree, snapshot: Snapshot) -> None:
    """Fill the empty `tree` with `snapshot`."""
    leaves = [tree.insert(tokens, 0.0) for tokens in snapshot.sequences]
    for saved in snapshot.marks:
        mark = Mark(saved.kind, saved.last_s, saved.touch)
        mark.hits = saved.hits
        tree.attach(tree.node_at(leaves[saved.sequence], saved.position), mark)
