"""Ghost history: a bounded, metadata-only radix tree of past requests.

It remembers token ids (4 bytes per token, against tens of kilobytes of KV), so a branch point is recognised
after its KV was evicted, and reuse is counted for every resume point, kept or not: the odds the forecast learns
are not censored by its own evictions. It is bounded by tokens and marks; the least recently used marks leave first.
"""

from typing import NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.reuse.chain import Chain
from sglang_hybrid.prefix.reuse.classes import PLAIN_CLASSES, reuse_class, room, site
from sglang_hybrid.prefix.reuse.hints import HintTrust
from sglang_hybrid.prefix.reuse.table import BINS, EDGES_LIST, ReuseTable, age_bin
from sglang_hybrid.prefix.tree.check import check as check_tree
from sglang_hybrid.prefix.tree.check import expect
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.radix_tree import RadixTree
from sglang_hybrid.prefix.tree.tokens import Tokens

PATH_MARKS = 128  # marks on the way of one prompt: every request along it looks at each
STRIDE = 2  # age bins whose passing is counted at once
AGED = 4096  # marks that one request ages at most, a millisecond: after an idle night all of a full history have aged


class HistoryMatch(NamedTuple):
    """What the history knew about a request: tokens seen before, and the marks on its way in order of position.

    `seen_tokens` of the input were seen before; `marks` lists (position, mark) for every resume point at or below
    that, `branch` the one created by this request (or None), `tip` the mark at its end, `declared` those of its
    boundaries. The latest request with all of the seen tokens had `kept_tokens` of its sequence cached (-1: unknown;
    0: they were only announced), and an evicted end of its own at `dropped_tokens` (0: none). `leaf` is the node of
    `tip`.
    """

    seen_tokens: int
    marks: tuple[tuple[int, Mark], ...]
    branch: Mark | None
    tip: Mark
    kept_tokens: int = -1
    leaf: Node | None = None
    declared: tuple[tuple[int, Mark], ...] = ()
    dropped_tokens: int = 0


class History:
    """The tree of past requests and the reuse table it feeds.

    `min_branch_tokens`: a branch point counts only if it lies that far beyond the resume point before it.
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
        # Marks by stage of age, each stage in order of last use: all in one order, from the last stage to the first.
        self._stages = [Chain() for _ in range((BINS - 1) // STRIDE + 1)]
        self._loose = 0  # marks that left the tree and go on ageing
        if max_tokens <= 0 or max_marks <= 0:
            raise ConfigError(f"the history needs room for at least one token and mark: {max_tokens}, {max_marks}")
        self.table = table
        self.trust = HintTrust(table, PLAIN_CLASSES)
        self.tree: RadixTree = RadixTree()
        self._max_tokens = max_tokens
        self._max_marks = max_marks
        self._min_branch_tokens = min_branch_tokens
        self._context_tokens = context_tokens

    def observe(self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = ()) -> HistoryMatch:
        """Enter one finished request, learn from it, and return what was known before it came."""
        self._age(now)
        prompt = tokens if n_input >= tokens.size else tokens[:n_input]
        found = self.tree.match(prompt)
        nodes = path_nodes(found.node, max(0, n_input - 1))
        if len(nodes) > PATH_MARKS:
            self._thin(nodes)
            found = self.tree.match(prompt)
            nodes = path_nodes(found.node, max(0, n_input - 1))
        kept, dropped = _kept(found.partial or found.node)
        marks = tuple((node.end, node.state) for node in nodes if node.state is not None)
        kind = self._tip_kind(found.kv_tokens, marks)
        if marks:
            self._use(nodes[-1], marks[-1][1], now)
        leaf = self.tree.insert(tokens, now, found=found)
        tip = self._mark(leaf, kind, now, marks[-1][1].depth + 1 if kind is Kind.APPENDED else 0)
        branch = None
        if found.kv_tokens < n_input and found.kv_tokens - (marks[-1][0] if marks else 0) >= self._min_branch_tokens:
            branch = self._mark(self.tree.node_at(leaf, found.kv_tokens), Kind.BRANCH, now)
        if n_input in boundaries and tip.kind in (Kind.FRESH, Kind.APPENDED, Kind.DIVERGED):
            tip.kind = Kind.DECLARED  # its own end: the answer does not move it away
            tip.site = site(False, 0)
            self._touch(tip)
        declared = tuple([(at, self._declared(leaf, at, at == boundaries[0], n_input, now)) for at in boundaries])
        self._evict()
        self.table.refresh()
        return tuple.__new__(HistoryMatch, (found.kv_tokens, marks, branch, tip, kept, leaf, declared, dropped))

    def extend(self, tokens: Tokens, tip: Mark, now: float) -> Mark:
        """A request entered with its input has ended as `tokens`: move its `tip` to their end, unless it stays.

        Returns the mark at the end of `tokens`.
        """
        found = self.tree.match(tokens)
        held = next((node for node in path_nodes(found.node, int(tokens.size)) if node.state is tip), None)
        leaf = self.tree.insert(tokens, now, found=found)
        if held is None or held is leaf or _stays(tip) or leaf.state is not None:
            mark = self._mark(leaf, Kind.APPENDED, now, tip.depth + 1)
        else:
            mark = tip
            self.tree.attach(leaf, tip)
            self.tree.drop(held)
            tip.node = leaf
            self._moved(tip, leaf, now)
        self._evict()
        return mark

    def lengthen(self, leaf: Node, tokens: Tokens, tip: Mark, now: float) -> bool:
        """What `extend` does where `tip` is the mark of `leaf` and does not stay: `tokens` follow upon the leaf.

        Returns whether that is so; nothing has changed if not.
        """
        if leaf.parent is None or leaf.state is not tip or leaf.children or _stays(tip):
            return False
        self.tree.lengthen(leaf, tokens)
        self._moved(tip, leaf, now)
        self._evict()
        return True

    def _moved(self, tip: Mark, leaf: Node, now: float) -> None:
        tip.last_s = now
        tip.room = room(leaf.end, self._context_tokens)
        self._touch(tip)

    def shorten(self, tokens: Tokens, keep: int) -> None:
        """Nobody computed `tokens` beyond the first `keep`: forget what of the rest nobody used or shares."""
        node = self.tree.match(tokens).node
        while node.parent is not None and node.end > keep and node.is_leaf:
            mark, above = node.state, node.parent
            if mark is None or mark.hits or mark.announced:
                break
            self._forget(mark, node)
            node = above
        self._evict()

    def resumed(self, mark: Mark, now: float) -> None:
        """Count a resumption from a mark that is not the deepest known one, because the deeper checkpoint was gone."""
        if mark.last_s < now:
            self._record_use(mark, now)
            mark.use(now)
            self._loose += mark.stage < 0
            self._touch(mark)

    def hint(self, mark: Mark, hint: int) -> None:
        """The client of `mark` said when it will be used again: `hint` is the class of that (`hint_classes`)."""
        mark.hint = hint
        mark.reuse_class = self.class_of(mark)

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
        if used.kind is Kind.SUPERSEDED or (used.kind is Kind.DECLARED and used.shared):
            used.kind = Kind.BRANCH
        elif used.kind != Kind.BRANCH:
            used.kind = Kind.SUPERSEDED
        self._touch(used)
        older = node.base()
        before = older.state
        if used.kind == Kind.SUPERSEDED and before is not None and before.kind == Kind.SUPERSEDED:
            # Long paths make every walk long. It goes on ageing, as good as never used again.
            before.node = None
            self.tree.drop(older)
            self._loose += 1

    def _declared(self, leaf: Node, at: int, first: bool, n_input: int, now: float) -> Mark:
        node = self.tree.node_at(leaf, at)
        known = node.state is not None
        mark = self._mark(node, Kind.DECLARED, now)
        if not known:
            mark.site = site(first, n_input - at)
            mark.reuse_class = self.class_of(mark)
        return mark

    def _mark(self, node: Node, kind: Kind, now: float, depth: int = 0) -> Mark:
        if node.state is not None:
            return node.state
        mark = Mark(kind, now)
        mark.depth = depth
        mark.room = room(node.end, self._context_tokens)
        self.tree.attach(node, mark)
        mark.node = node
        self._touch(mark)
        return mark

    def _touch(self, mark: Mark) -> None:
        """`mark` is the most recently used one now."""
        mark.reuse_class = self.class_of(mark)
        self._enter(mark, 0)

    def _enter(self, mark: Mark, stage: int) -> None:
        if mark.stage >= 0:
            self._stages[mark.stage].remove(mark)
        mark.stage = stage
        self._stages[stage].append(mark)

    def _age(self, now: float) -> None:
        """Count the marks that outlived another `STRIDE` age bins unused, `AGED` at once: the others later."""
        last, left = len(self._stages) - 1, AGED
        for stage in range(last):
            chain, end = self._stages[stage], (stage + 1) * STRIDE
            limit = now - EDGES_LIST[end]
            mark = chain.first
            while mark is not None and mark.last_s <= limit and left:
                left -= 1
                if mark.hint:
                    self.trust.passed(mark.hint, reuse_class(mark), end - STRIDE, end)
                else:
                    self.table.record_passed(mark.reuse_class, end - STRIDE, end)
                if mark.node is None and stage + 1 == last:
                    self._leave(mark)
                else:
                    self._enter(mark, stage + 1)
                mark = chain.first

    def _record_use(self, mark: Mark, now: float) -> None:
        at_bin = age_bin(now - mark.last_s)
        stage = mark.stage if mark.stage >= 0 else min(at_bin // STRIDE, len(self._stages) - 1)
        counted = stage * STRIDE  # `_age` has counted these bins already
        if mark.hint:
            self.trust.used(mark.hint, reuse_class(mark), at_bin, counted)
        else:
            self.table.record_use(mark.reuse_class, at_bin, counted)

    def _evict(self) -> None:
        while self.tree.kv_tokens > self._max_tokens or self.tree.states + self._loose > self._max_marks:
            oldest = next((chain.first for chain in reversed(self._stages) if chain.first is not None), None)
            if oldest is None:
                break
            if oldest.node is None:
                self._leave(oldest)
            else:
                self._forget(oldest, oldest.node)
        self.tree.changed.clear()
        self.tree.rebased.clear()

    def _thin(self, nodes: list[Node]) -> None:
        """Forget half of the marks on a path that has too many: those never used, then the least recently used.

        A client can declare other boundaries, or part from a prompt elsewhere, with every request.
        """
        for node in sorted(nodes, key=_usefulness)[: len(nodes) // 2]:
            if node.state is not None:
                self._forget(node.state, node)

    def class_of(self, mark: Mark) -> int:
        """The reuse class of a mark now, in the history or not."""
        plain = reuse_class(mark)
        return self.trust.reuse_class(mark.hint, plain) if mark.hint else plain

    def _forget(self, mark: Mark, node: Node) -> None:
        """Drop `mark` from `node`; whether it is used again stays unknown, so its age is no longer counted."""
        mark.node = None
        self.tree.drop(node)
        self._loose += 1
        self._leave(mark)

    def _leave(self, mark: Mark) -> None:
        """A loose mark ages no more."""
        self._stages[mark.stage].remove(mark)
        mark.stage = -1
        self._loose -= 1

    def __del__(self) -> None:
        """Take the links apart: marks are not garbage collected."""
        for chain in self._stages:
            for mark in chain:
                mark.node = None
            chain.clear()

    def check(self) -> None:
        """Raise InvariantError where tree, recency order or bounds disagree."""
        check_tree(self.tree)
        for stage, chain in enumerate(self._stages):
            chain.check()
            for mark in chain:
                expect(mark.stage == stage, "stage of a mark", mark.stage, stage)
                expect(mark.node is None or mark.node.state is mark, "node of a mark", mark.node, mark)
        chained = sum(chain.size for chain in self._stages)
        expect(chained == self.tree.states + self._loose, "marks in order", chained, self.tree.states + self._loose)
        expect(self.tree.kv_tokens <= self._max_tokens, "history tokens", self.tree.kv_tokens, self._max_tokens)
        expect(self.tree.states <= self._max_marks, "history marks", self.tree.states, self._max_marks)
        self.table.check()


def _usefulness(node: Node) -> tuple[bool, float]:
    mark = node.state
    return (False, 0.0) if mark is None else (mark.hits > 0 or mark.announced, mark.last_s)


def _stays(tip: Mark) -> bool:
    """Whether the mark at a prompt's end stays there when the answer comes: others used it, or it was declared."""
    return tip.hits > 0 or tip.kind is Kind.DECLARED


def _kept(node: Node) -> tuple[int, int]:
    """`kept_tokens` and `dropped_tokens` of the latest sequence through `node`, by the marks there and next below."""
    kept, dropped = -1, 0
    at: Node | None = node
    while at is not None:
        mark = at.state
        if mark is not None:
            kept = max(kept, 0 if mark.announced else at.end - mark.unkept)
            dropped = max(dropped, mark.dropped)
            if at is not node:
                break
        at = next(reversed(at.children.values()), None)
    return kept, dropped


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
