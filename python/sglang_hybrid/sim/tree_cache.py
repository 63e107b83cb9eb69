"""The part of a cache that SGLang plays in a server: a radix tree whose content `Decisions` govern."""

from collections import Counter

from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.tree.check import check as check_tree
from sglang_hybrid.prefix.tree.check import expect, walk
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.radix_tree import RadixTree
from sglang_hybrid.prefix.tree.tokens import Tokens


class TreeCache:
    """KV and states of finished and running requests, evicted from `pools`."""

    def __init__(self, decisions: Decisions, pools: tuple[PoolKind, ...], settles: bool = True) -> None:
        self.decisions = decisions
        self.model = decisions.model
        self.tree: RadixTree = RadixTree(kv_only=self.model.checkpoint_bytes == 0, settles=settles)
        self._nobody = Mark(Kind.SUPERSEDED, 0.0)  # stands for the mark of KV behind the last state
        self._nobody.reuse_class = decisions.history.class_of(self._nobody)
        self._evictable: dict[PoolKind, dict[int, Node]] = {pool: {} for pool in pools}
        self._states_in_use: Counter[int] = Counter()  # by node: states that a request is about to copy

    def used_bytes(self) -> int:
        """Bytes of KV and states held, those of running requests not counted."""
        return self.tree.kv_tokens * self.model.kv_bytes_per_token + self.tree.states * self.model.checkpoint_bytes

    def resume(self, request: Request, node: Node) -> None:
        """`request` resumes at `node`: that may turn out to be a branch, and LRU may have resumed it above."""
        decisions, tree = self.decisions, self.tree
        if node.state is not None:
            branch = decisions.branch(request, node.end, node.state)
            if branch is not None:
                self.place(node, branch, request.arrived_s)
            decisions.resumed(request, node.state)
            tree.changed[node.id] = node
        for at in decisions.uses(request):
            used: Node | None = node
            while used is not None and used.end > at:
                used = used.parent
            if used is not None and used.end == at and used.state is not None:
                decisions.touch(used.state)
                tree.changed[used.id] = used

    def save(self, request: Request, tokens: Tokens, places: dict[int, int], now: float) -> Node:
        """Save states at `places`, positions with what each stands for; returns the node of the last.

        Of KV alone everything up to the last place is saved.
        """
        tree, decisions = self.tree, self.decisions
        end = max(places)
        leaf = tree.insert(tokens[:end], now)
        for at in () if tree.kv_only else sorted(places):
            node = leaf if at == leaf.end else tree.node_at(leaf, at)
            if node.state is None:
                mark = self.mark(request, places[at], at < end, now)
                tree.attach(node, mark)
                self.place(node, mark, now)
            else:
                decisions.touch(node.state)
                tree.changed[node.id] = node
        if tree.kv_only:
            self._mark_path(request, leaf, now)
        decisions.saved(request, sorted(places))
        return leaf

    def mark(self, request: Request, wanted: int, later: bool, now: float) -> Mark:
        """The mark for a state wanted at `wanted`; whether a `later` one of the request is saved."""
        return self.decisions.mark(request, wanted, now)

    def _mark_path(self, request: Request, leaf: Node, now: float) -> None:
        """Of KV alone every node of the path has a mark, for a request resumes anywhere; all count as used."""
        node = leaf
        while node.parent is not None:
            mark = self.decisions.mark(request, node.end, now)
            if node.state is None:
                self.tree.attach(node, mark)
            node.state = mark
            self.tree.changed[node.id] = node
            node = node.parent

    def place(self, node: Node, mark: Mark, now: float) -> None:
        """The state at `node` gets `mark`."""
        mark.evicted = False
        for changed, its in self.decisions.place(mark, node, node.end, now):
            assert isinstance(changed, Node)
            changed.state = its
            self.tree.changed[changed.id] = changed

    def supersede(self, request: Request, earlier: Node | None, later: Node, now: float) -> None:
        """The state at `later` continues that at `earlier`, both of `request`."""
        if earlier is None or earlier is later or earlier.parent is None or earlier.state is None:
            return
        old = self.decisions.superseded(request, earlier.state, earlier.end, now)
        if old is not None:
            self.place(earlier, old, now)

    def victim(self, pool: PoolKind, now: float) -> Node | None:
        """What is to be evicted next from `pool`; the caller evicts it."""
        self._reindex()
        victim = self.decisions.victim(pool, now)
        return None if victim is None else self._evictable[pool].pop(victim)

    def weakest(
        self, pool: PoolKind, contenders: dict[int, Candidate], count: int, now: float
    ) -> tuple[list[Node], list[int]]:
        """The `count` that are worth least of `pool` and `contenders`: what is to be evicted, ids of contenders."""
        self._reindex()
        found = self.decisions.weakest(pool, contenders, count, now)
        evictable = self._evictable[pool]
        return [evictable.pop(one) for one in found if one not in contenders], [
            one for one in found if one in contenders
        ]

    def evict(self, node: Node) -> None:
        """Drop `node` if it is a leaf that nobody reads, else its state; KV that nothing needs goes with that."""
        tree = self.tree
        if node.state is not None:
            self.decisions.evicted(node.state)
        if not tree.settles and not node.children and not node.locks:
            tree.cut(node)
        else:
            tree.drop(node)

    def _goes(self, pool: PoolKind, node: Node) -> bool:
        if node.parent is None:
            return False
        leaves = not node.children and not node.locks
        if self.tree.kv_only or pool is PoolKind.KV:
            return leaves
        free = node.state is not None and not self._states_in_use[node.id]
        return free or (leaves and pool is PoolKind.BYTES)

    def _reindex(self) -> None:
        """Put or discard every node that changed, and those priced relative to it."""
        tree, decisions = self.tree, self.decisions
        stack = list(tree.rebased.values())
        while stack:
            node = stack.pop()
            tree.changed[node.id] = node
            if node.state is None:
                stack.extend(node.children.values())
        for pool, known in self._evictable.items():
            for node in tree.changed.values():
                if self._goes(pool, node):
                    known[node.id] = node
                    decisions.put(pool, self._candidate(node))
                elif known.pop(node.id, None) is not None:
                    decisions.discard(pool, node.id)
        tree.rebased.clear()
        tree.changed.clear()

    def check(self) -> None:
        """Raise InvariantError where tree, indices or history disagree."""
        check_tree(self.tree)
        self._reindex()
        self.decisions.check()
        for pool, known in self._evictable.items():
            live = {node.id for node in walk(self.tree) if self._goes(pool, node)}
            expect(live == set(known), "evictable nodes", len(known), len(live))

    def _candidate(self, node: Node) -> Candidate:
        """`node` as an eviction order sees it."""
        mark, parent = node.state or self._nobody, node.parent
        assert parent is not None
        base = node.base()
        return Candidate(
            id=node.id,
            end_tokens=base.end if node.state is None else node.end,  # KV behind the last state saves nothing
            base_tokens=base.end,
            parent_tokens=parent.end,
            freed_kv_tokens=0 if node.children else node.end - parent.end,
            states=int(node.state is not None),
            children=len(node.children),
            last_s=mark.last_s,
            touch=mark.touch,
            hits=mark.hits,
            superseded=mark.kind is Kind.SUPERSEDED,
            reuse_class=mark.reuse_class,
        )
