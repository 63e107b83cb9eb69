"""Ghost history: a bounded, metadata-only radix tree of past requests.

It remembers token ids (4 bytes per token, against tens of kilobytes of KV), so a branch point is recognised
after its KV was evicted, and reuse is counted for every restart position, kept or not: the odds the forecast learns
are not censored by its own evictions. It is bounded by tokens and marks; the least recently used marks leave first.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.classes import reuse_class, room
from sglang_hybrid.prefix.mark import Kind, Mark
from sglang_hybrid.prefix.node import Node
from sglang_hybrid.prefix.reuse import BINS, EDGES_LIST, ReuseTable, age_bin
from sglang_hybrid.prefix.tokens import Tokens
from sglang_hybrid.prefix.tree import RadixTree
from sglang_hybrid.prefix.tree_check import check as check_tree
from sglang_hybrid.prefix.tree_check import expect

PATH_MARKS = 128  # marks on the way of one prompt: every request along it looks at each
STRIDE = 2  # age bins whose passing is counted at once


class Sighting(NamedTuple):
    """What the history knew about a request: tokens seen before, and the marks on its way in order of position.

    `seen_tokens` of the input were seen before; `marks` lists (position, mark) for every restart position at or below
    that, `branch` the one created by this request (or None), `tip` the mark at its end. The latest request with all of
    the seen tokens had `kept_tokens` of its sequence cached (-1: unknown; 0: they were only announced). `leaf` is the
    node of `tip`.
    """

    seen_tokens: int
    marks: tuple[tuple[int, Mark], ...]
    branch: Mark | None
    tip: Mark
    kept_tokens: int = -1
    leaf: Node | None = None


class History:
    """The tree of past requests and the reuse table it feeds.

    `min_branch_tokens`: a branch point counts only if it lies that far beyond the restart position before it.
    `context_tokens`: no request is longer (0: unknown).
    """

    def __init__(
        self,
        table: ReuseTable,
        max_tokens: int = 32_000_000,
        max_marks: int = 400_000,
        min_branch_tokens: int = 16,
        context_tokens: int = 0,
    ) -> None:
        if max_tokens <= 0 or max_marks <= 0:
            raise ConfigError(f"the history needs room for at least one token and mark: {max_tokens}, {max_marks}")
        self.table = table
        self.tree: RadixTree = RadixTree()
        self._max_tokens = max_tokens
        self._max_marks = max_marks
        self._min_branch_tokens = min_branch_tokens
        self._context_tokens = context_tokens
        self._recency: OrderedDict[int, Node] = OrderedDict()
        self._due = [_Queue() for _ in range((BINS - 1) // STRIDE)]
        self._uses = 0

    def observe(self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = ()) -> Sighting:
        """Enter one finished request, learn from it, and return what was known before it came."""
        self._age(now)
        prompt = tokens if n_input >= tokens.size else tokens[:n_input]
        found = self.tree.match(prompt)
        nodes = path_nodes(found.node, max(0, n_input - 1))
        if len(nodes) > PATH_MARKS:
            self._thin(nodes)
            found = self.tree.match(prompt)
            nodes = path_nodes(found.node, max(0, n_input - 1))
        kept = _kept(found.partial or found.node)
        marks = tuple((node.end, node.state) for node in nodes if node.state is not None)
        kind = self._tip_kind(found.kv_tokens, marks)
        if marks:
            self._use(nodes[-1], marks[-1][1], now)
        leaf = self.tree.insert(tokens, now, found=found)
        tip = self._mark(leaf, kind, now, marks[-1][1].depth + 1 if kind is Kind.APPENDED else 0)
        branch = None
        if found.kv_tokens < n_input and found.kv_tokens - (marks[-1][0] if marks else 0) >= self._min_branch_tokens:
            branch = self._mark(self.tree.node_at(leaf, found.kv_tokens), Kind.BRANCH, now)
        for position in boundaries:
            self._mark(self.tree.node_at(leaf, position), Kind.DECLARED, now)
        self._evict()
        self.table.refresh()
        return tuple.__new__(Sighting, (found.kv_tokens, marks, branch, tip, kept, leaf))

    def extend(self, tokens: Tokens, tip: Mark, now: float) -> Mark:
        """A request entered with its input has ended as `tokens`: move its `tip` to their end, unless it was used.

        Returns the mark at the end of `tokens`.
        """
        found = self.tree.match(tokens)
        held = next((node for node in path_nodes(found.node, int(tokens.size)) if node.state is tip), None)
        leaf = self.tree.insert(tokens, now, found=found)
        if held is None or held is leaf or tip.hits or leaf.state is not None:
            mark = self._mark(leaf, Kind.APPENDED, now, tip.depth + 1)
        else:
            mark = tip
            self.tree.attach(leaf, tip)
            self._recency[leaf.id] = leaf
            self._forget(held)
            self._moved(tip, leaf, now)
        self._evict()
        return mark

    def lengthen(self, leaf: Node, tokens: Tokens, tip: Mark, now: float) -> bool:
        """What `extend` does where `tip` is still the mark of `leaf` and nobody used it: `tokens` follow upon the leaf.

        Returns whether that is so; nothing has changed if not.
        """
        if leaf.parent is None or leaf.state is not tip or leaf.children or tip.hits:
            return False
        self.tree.lengthen(leaf, tokens)
        self._recency.move_to_end(leaf.id)
        self._moved(tip, leaf, now)
        self._evict()
        return True

    def _moved(self, tip: Mark, leaf: Node, now: float) -> None:
        tip.last_s = now
        tip.room = room(leaf.end, self._context_tokens)
        self._touch(tip, now)

    def shorten(self, tokens: Tokens, keep: int) -> None:
        """Nobody computed `tokens` beyond the first `keep`: forget what of the rest nobody used or shares."""
        node = self.tree.match(tokens).node
        while node.parent is not None and node.end > keep and node.is_leaf:
            mark, above = node.state, node.parent
            if mark is None or mark.hits or mark.announced:
                break
            mark.version = -1
            self._forget(node)
            node = above
        self._evict()

    def restart(self, mark: Mark, now: float) -> None:
        """Count a restart from a mark that is not the deepest known one, because the deeper checkpoint was gone."""
        if mark.last_s < now:
            self._record_use(mark, now)
            mark.use(now)
            self._touch(mark, now)

    def seed(self, tokens: Tokens, now: float) -> None:
        """Announce a hot prefix: its first request is treated as a second sighting."""
        if tokens.size:
            node = self.tree.insert(tokens, now)
            announced = node.state is None
            self._mark(node, Kind.DECLARED, now).announced = announced
            self._evict()

    def _tip_kind(self, seen: int, marks: tuple[tuple[int, Mark], ...]) -> Kind:
        if not marks:
            return Kind.FRESH if seen < self._min_branch_tokens else Kind.DIVERGED
        position, used = marks[-1]
        if seen - position >= self._min_branch_tokens:
            return Kind.DIVERGED
        return Kind.FRESH if used.kind in (Kind.BRANCH, Kind.DECLARED) else Kind.APPENDED

    def _use(self, node: Node, used: Mark, now: float) -> None:
        """Count the reuse of a mark; an end becomes superseded, or a branch once it was used again after that."""
        self._record_use(used, now)
        used.use(now)
        if used.kind in (Kind.DECLARED, Kind.SUPERSEDED):
            used.kind = Kind.BRANCH
        elif used.kind != Kind.BRANCH:
            used.kind = Kind.SUPERSEDED
        self._touch(used, now)
        self._recency.move_to_end(node.id)
        older = node.base()
        if used.kind == Kind.SUPERSEDED and older.state is not None and older.state.kind == Kind.SUPERSEDED:
            self._forget(older)  # long chains make every walk long; it goes on ageing, as good as never used again

    def _mark(self, node: Node, kind: Kind, now: float, depth: int = 0) -> Mark:
        if node.state is not None:
            return node.state
        mark = Mark(kind, now)
        mark.depth = depth
        mark.room = room(node.end, self._context_tokens)
        self.tree.attach(node, mark)
        self._recency[node.id] = node
        self._touch(mark, now)
        return mark

    def _touch(self, mark: Mark, now: float) -> None:
        self._uses += 1
        mark.version = self._uses
        mark.reuse_class = reuse_class(mark)
        self._due[0].add(mark, mark.version)

    def _age(self, now: float) -> None:
        """Count the marks that outlived another `STRIDE` age bins unused."""
        for step, queue in enumerate(self._due):
            end = (step + 1) * STRIDE
            limit = now - EDGES_LIST[end]
            while queue.marks:
                mark, version = queue.marks[0], queue.versions[0]
                if mark.version == version:
                    if mark.last_s > limit:
                        break
                    self.table.record_passed(mark.reuse_class, end - STRIDE, end)
                    if step + 1 < len(self._due):
                        self._due[step + 1].add(mark, version)
                queue.marks.popleft()
                queue.versions.popleft()

    def _record_use(self, mark: Mark, now: float) -> None:
        at_bin = age_bin(now - mark.last_s)
        counted = min(at_bin // STRIDE, len(self._due)) * STRIDE  # `_age` has counted these bins already
        self.table.record_use(mark.reuse_class, at_bin, counted)

    def _evict(self) -> None:
        while self._recency and (self.tree.kv_tokens > self._max_tokens or self.tree.states > self._max_marks):
            oldest = next(iter(self._recency.values()))
            if oldest.state is not None:
                oldest.state.version = -1  # its age is no longer counted: whether it is used again stays unknown
            self._forget(oldest)
        self.tree.changed.clear()
        self.tree.rebased.clear()

    def _thin(self, nodes: list[Node]) -> None:
        """Forget half of the marks on a path that has too many: those never used, then the least recently used.

        A client can declare other boundaries, or part from a prompt elsewhere, with every request.
        """
        for node in sorted(nodes, key=_usefulness)[: len(nodes) // 2]:
            if node.state is not None:
                node.state.version = -1  # whether it is used again stays unknown
                self._forget(node)

    def class_of(self, mark: Mark) -> int:
        """The reuse class of a mark that is not in the history."""
        return reuse_class(mark)

    def _forget(self, node: Node) -> None:
        del self._recency[node.id]
        self.tree.drop(node)

    def check(self) -> None:
        """Raise InvariantError where tree, recency order or bounds disagree."""
        check_tree(self.tree)
        expect(len(self._recency) == self.tree.states, "marks in recency order", len(self._recency), self.tree.states)
        expect(self.tree.kv_tokens <= self._max_tokens, "history tokens", self.tree.kv_tokens, self._max_tokens)
        expect(self.tree.states <= self._max_marks, "history marks", self.tree.states, self._max_marks)
        self.table.check()


class _Queue:
    """Marks in order of last use, with the version they had: a stale one was used again. Two deques, for pairs of them
    would be as many objects as all marks for the garbage collector to walk over."""

    __slots__ = ("marks", "versions")

    def __init__(self) -> None:
        self.marks: deque[Mark] = deque()
        self.versions: deque[int] = deque()

    def add(self, mark: Mark, version: int) -> None:
        self.marks.append(mark)
        self.versions.append(version)


def _usefulness(node: Node) -> tuple[bool, float]:
    mark = node.state
    return (False, 0.0) if mark is None else (mark.hits > 0 or mark.announced, mark.last_s)


def _kept(node: Node) -> int:
    """How much of the latest sequence through `node` was kept, by the mark there or the next below: `kept_tokens`."""
    kept = -1
    at: Node | None = node
    while at is not None and kept < node.end:
        if at.state is not None:
            kept = max(kept, 0 if at.state.announced else at.end - at.state.unkept)
            if at is not node:
                break
        at = next(reversed(at.children.values()), None)
    return kept


def path_nodes(node: Node, limit: int) -> list[Node]:
    """Nodes with a mark from the root down to `node`, positions at most `limit`."""
    nodes = []
    at: Node | None = node
    while at is not None:
        if at.state is not None and at.end <= limit:
            nodes.append(at)
        at = at.parent
    nodes.reverse()
    return nodes
