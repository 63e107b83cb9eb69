"""Which prefix of which request had been seen before: the radix tree of a whole trace, past and future.

Only ceilings use it; a cache never sees the future. Nodes stand where requests part, end, or could at most resume.
Node 0 is the root; node v ends `depth[v]` tokens from the start and its edge begins at `depth[parent[v]]`.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.sim.trace import Tokens, Trace

Nodes = npt.NDArray[np.int64]


class ReuseIndex:
    """The radix tree over all sequences of a trace and, per request, how much of its input came before."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._kids: list[dict[int, int]] = [{}]
        self._edge: list[Tokens] = [np.empty(0, dtype=np.int32)]
        self._parent = [0]
        self._depth = [0]
        seen = np.zeros(len(trace), dtype=np.int64)
        ends = []
        for j, r in enumerate(trace.requests):
            seen[j], end = self._insert(r.tokens, r.n_input - 1)  # the last token is always computed, for its logits
            ends.append(end)
        self.seen_tokens: Nodes = seen
        self._ends = ends
        self.depth: Nodes = np.array(self._depth, dtype=np.int64)
        self.parent: Nodes = np.array(self._parent, dtype=np.int64)

    @cached_property
    def n_input(self) -> Nodes:
        """Input tokens per request."""
        return np.array([r.n_input for r in self.trace.requests], dtype=np.int64)

    @cached_property
    def paths(self) -> list[Nodes]:
        """Per request the nodes from below the root to its end, shallow first."""
        return [self._path(end) for end in self._ends]

    @cached_property
    def targets(self) -> Nodes:
        """Per request the node at `seen_tokens`, the deepest place it could resume from; 0 where there is none."""
        found = np.zeros(len(self.paths), dtype=np.int64)
        for j, path in enumerate(self.paths):
            seen = self.seen_tokens[j]
            if seen:
                at = int(np.searchsorted(self.depth[path], seen))
                found[j] = path[at]
        return found

    def check(self) -> None:
        """Raise InvariantError unless depths, edges and targets agree."""
        for v in range(1, len(self.depth)):
            if self._depth[v] != self._depth[self._parent[v]] + len(self._edge[v]) or not len(self._edge[v]):
                raise InvariantError(f"edge and depth of a node disagree: {v}")
        wrong = np.flatnonzero(self.depth[self.targets] != self.seen_tokens)
        if len(wrong):
            raise InvariantError(f"a request's resume point is not a node: {int(wrong[0])}")

    def _path(self, end: int) -> Nodes:
        nodes = []
        while end:
            nodes.append(end)
            end = self._parent[end]
        return np.array(nodes[::-1], dtype=np.int64)

    def _insert(self, tokens: Tokens, limit: int) -> tuple[int, int]:
        """Add one sequence; return how many of its first `limit` tokens came before, and the node of its end."""
        node, at = 0, 0
        while at < len(tokens):
            child = self._kids[node].get(int(tokens[at]))
            if child is None:
                break
            edge = self._edge[child]
            shared = _shared(edge, tokens[at : at + len(edge)])
            if at < limit < at + shared:
                child = self._split(child, limit - at)
                shared = limit - at
            elif shared < len(edge):
                child = self._split(child, shared)
            at += shared
            node = child
            if shared < len(edge) and at != limit:
                break
        seen = min(at, limit)
        if at < len(tokens):
            node = self._add(node, tokens[at:])
        return seen, node

    def _add(self, parent: int, edge: Tokens) -> int:
        node = len(self._depth)
        self._kids[parent][int(edge[0])] = node
        self._kids.append({})
        self._edge.append(edge)
        self._parent.append(parent)
        self._depth.append(self._depth[parent] + len(edge))
        return node

    def _split(self, lower: int, at: int) -> int:
        """Cut the edge of `lower` after `at` tokens; the new upper node is returned, `lower` keeps its number."""
        edge, parent = self._edge[lower], self._parent[lower]
        upper = self._add(parent, edge[:at])
        self._kids[upper][int(edge[at])] = lower
        self._edge[lower] = edge[at:]
        self._parent[lower] = upper
        return upper


def _shared(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
