"""The prefix cache as decisions over one byte budget: tree, history, admission and eviction composed."""

from typing import NamedTuple, Protocol

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import AdmissionPolicy, Prefill
from sglang_hybrid.prefix.candidates import Candidate, VictimIndex
from sglang_hybrid.prefix.elapsed import Elapsed
from sglang_hybrid.prefix.guard import Guard, GuardedIndex, passed, restored
from sglang_hybrid.prefix.history import Sighting
from sglang_hybrid.prefix.mark import Kind, Mark
from sglang_hybrid.prefix.node import Node
from sglang_hybrid.prefix.snapshot import Snapshot, load
from sglang_hybrid.prefix.tokens import Tokens, as_tokens
from sglang_hybrid.prefix.tree import REBASED_CHILDREN, Match, RadixTree
from sglang_hybrid.prefix.tree_check import check as check_tree
from sglang_hybrid.prefix.tree_check import expect, walk

REPRICED_DESCENDANTS = REBASED_CHILDREN


class Commit(NamedTuple):
    """What one commit did: checkpoint positions taken, checkpoints evicted for them, KV tokens held afterwards."""

    positions: tuple[int, ...]
    evicted: int
    kv_tokens: int


class Learner(Protocol):
    """What remembers past requests: `History`, or something around it."""

    def observe(self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = ()) -> Sighting: ...

    def restart(self, mark: Mark, now: float) -> None: ...

    def seed(self, tokens: Tokens, now: float) -> None: ...

    def check(self) -> None: ...


class Feedback(Protocol):
    """Told about evictions and about restarts that an eviction prevented."""

    def evicted(self, mark: Mark) -> None: ...

    def missed(self, mark: Mark) -> None: ...


class PrefixCache:
    """A hybrid prefix cache of `capacity_bytes`, never exceeded between calls.

    `bypass=True`: a new entry is inserted and the lowest score goes, be it the new entry (insert-then-trim). Otherwise
    room is made first, as SGLang and Marconi do. Of a sequence larger than the cache only what fits is admitted. With a
    `guard`, eviction follows `index` unless LRU does better. Time that runs backwards is taken as the latest time seen.
    """

    def __init__(
        self,
        model: ModelSpec,
        capacity_bytes: int,
        admission: AdmissionPolicy,
        index: VictimIndex,
        history: Learner | None = None,
        bypass: bool = False,
        feedback: "Feedback | None" = None,
        guard: Guard | None = None,
    ) -> None:
        if capacity_bytes < 0:
            raise ConfigError(f"a cache needs a capacity of zero bytes or more: {capacity_bytes}")
        self.model = model
        self.capacity_bytes = capacity_bytes
        self.tree: RadixTree = RadixTree(kv_only=model.checkpoint_bytes == 0)
        self.history = history
        self._admission = admission
        self.guard = guard
        self._index = index if guard is None else GuardedIndex(index, guard)
        self._bypass = bypass
        self.feedback = feedback
        self._nodes: dict[int, Node] = {}
        self._elapsed = Elapsed()
        self._uses = 0
        self._held: dict[int, Node] = {}  # not evictable while this request makes room for them
        self._kv_bytes, self._state_bytes = model.kv_bytes_per_token, model.checkpoint_bytes

    def used_bytes(self) -> int:
        """Bytes of KV and checkpoints held."""
        tree = self.tree
        return tree.kv_tokens * self._kv_bytes + tree.states * self._state_bytes

    def lookup(self, tokens: Tokens, now: float) -> int:
        """Tokens a prefill of `tokens` can skip: at most all but the last, which must be computed for its logits."""
        tokens = as_tokens(tokens)
        self._elapsed.look(now)
        return self.tree.match(tokens, tokens.size - 1).restart_tokens if tokens.size else 0

    def commit(self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = ()) -> Commit:
        """Offer the finished request `tokens` (input, then output) for caching.

        `boundaries` are input positions the caller knows will be shared (end of a system prompt, of a message).
        Raises ConfigError for lengths or boundaries outside the sequence.
        """
        tokens = as_tokens(tokens)
        total = tokens.size
        if not 0 <= n_input <= total:
            raise ConfigError(f"n_input counts the first tokens of {total}: {n_input}")
        if boundaries and not 0 < min(boundaries) <= max(boundaries) <= n_input:
            raise ConfigError(f"a boundary is a position in the {n_input} input tokens: {boundaries}")
        now = self._elapsed.request(now)
        if total == 0:
            return Commit((), 0, self.tree.kv_tokens)
        found = self.tree.match(tokens[:n_input], n_input - 1 if n_input else 0)
        sighting = None if self.history is None else self.history.observe(tokens, n_input, now, boundaries)
        self._uses += 1
        if sighting is not None and sighting.marks:
            position, mark = sighting.marks[-1]
            if self.feedback is not None and position > found.restart_tokens:
                self.feedback.missed(mark)
        restart = found.restart
        lru = self._compare(tokens[:n_input], found)
        if restart.state is not None:
            self._use(restart, restart.state, now)
        prefill: Prefill = tuple.__new__(
            Prefill, (found.restart_tokens, found.kv_tokens, n_input, total, boundaries, sighting)
        )
        positions = [] if self.tree.kv_only else self._admission.positions(prefill)
        if self.guard is not None and self.guard.by_recency and not self.tree.kv_only:
            positions = restored(positions, found.restart_tokens, lru.restart_tokens)
        evicted = self._admit(tokens, positions, prefill, found, now)
        self._reindex()
        if self.guard is not None:
            self.guard.shadow.save(tokens, self._offered(self.guard, positions, prefill, lru), lru.node)
            self.guard.shadow.fit(held_bytes=self.capacity_bytes)
        return tuple.__new__(Commit, (tuple(positions), evicted, self.tree.kv_tokens))

    def _compare(self, prompt: Tokens, found: Match) -> Match:
        """What LRU would find of `prompt`, of which `found` is found here; where it restarts counts as used."""
        lru = found
        if self.guard is not None:
            lru = self.guard.arrive(prompt, max(0, int(prompt.size) - 1), found.restart_tokens)
            if self.guard.by_recency and lru.restart_tokens > found.restart_tokens:
                return lru  # saved here now, as `restored`
            node: Node | None = found.restart
            while node is not None and node.end > lru.restart_tokens:
                node = node.parent
            if node is not None and node.end == lru.restart_tokens:
                self._touch(node)
        self._touch(found.restart)
        return lru

    def _touch(self, node: Node) -> None:
        if node.state is not None:
            node.state.touch = self._tick()
            self.tree.changed[node.id] = node

    def _tick(self) -> int:
        """The order of uses: with a guard, of those of one request as well."""
        if self.guard is not None:
            self._uses += 1
        return self._uses

    def _offered(self, guard: Guard, positions: list[int], prefill: Prefill, lru: Match) -> list[int]:
        """The `positions` saved here, and those that LRU would have had to save before this request restarted."""
        if self.tree.kv_only:
            return [prefill.end_tokens]
        if lru.restart_tokens >= prefill.restart_tokens:
            return positions
        return sorted({*positions, *passed(self._admission, guard, prefill, lru.restart_tokens, lru.kv_tokens)})

    def lock(self, tokens: Tokens) -> Node:
        """Protect what `lookup` would return for `tokens` until `unlock`; returns the handle for it."""
        node = self.tree.match(as_tokens(tokens), max(0, len(tokens) - 1)).restart
        self.tree.lock(node)
        self._reindex()
        return node

    def unlock(self, node: Node) -> None:
        """Undo one `lock`; raises ConfigError without one."""
        self.tree.unlock(node)
        self._reindex()

    def seed(self, tokens: Tokens, now: float) -> None:
        """Announce a hot prefix: a checkpoint is taken at its end by the first request that computes it."""
        if self.history is not None:
            self.history.seed(as_tokens(tokens), self._elapsed.look(now))

    def load(self, snapshot: Snapshot) -> None:
        """Fill this empty cache with a saved tree; raises ConfigError if it is not empty or too small."""
        if self.tree.nodes:
            raise ConfigError(f"load a snapshot into an empty cache, this holds nodes: {self.tree.nodes}")
        load(self.tree, snapshot)
        self._uses = max((mark.touch for mark in snapshot.marks), default=0)
        self._reindex()
        if self.used_bytes() > self.capacity_bytes:
            raise ConfigError(f"the snapshot needs more than {self.capacity_bytes} bytes: {self.used_bytes()}")

    def _use(self, node: Node, mark: Mark, now: float) -> None:
        if self.tree.kv_only:
            mark.touch = self._uses
        if mark.heir is not None:
            mark.heir = None  # the history has counted the use of the heir
        elif self.history is not None:
            self.history.restart(mark, now)
        else:
            mark.last_s = now
            mark.hits += 1
            if node.is_leaf and mark.kind != Kind.BRANCH:
                mark.kind = Kind.SUPERSEDED
            elif mark.kind == Kind.SUPERSEDED:
                mark.kind = Kind.BRANCH
        self.tree.changed[node.id] = node

    def _admit(self, tokens: Tokens, positions: list[int], prefill: Prefill, found: Match, now: float) -> int:
        if not positions and not self.tree.kv_only:
            return 0
        end = prefill.end_tokens if self.tree.kv_only else positions[-1]
        end = self._fit(end, positions, prefill.restart_tokens)
        positions[:] = [at for at in positions if at <= end]
        if prefill.sighting is not None and end < prefill.end_tokens and found.restart.state is not None:
            self._inherit(found.restart, prefill.sighting.tip)
        if end == 0 or (not positions and not self.tree.kv_only):
            return 0
        tree = self.tree
        sequence = tokens if end == tokens.size else tokens[:end]
        leaf = tree.insert(sequence, now, found=found if end >= prefill.input_tokens else None)
        for at in positions:
            node = leaf if at == leaf.end else tree.node_at(leaf, at)
            if node.state is None:
                tree.attach(node, self._mark(at, prefill, now))
            elif self.guard is not None:
                self._touch(node)
        if tree.kv_only or (prefill.sighting is not None and prefill.sighting.marks):
            self._adopt(leaf, prefill, now)
        if not self._bypass and not (self.guard is not None and self.guard.by_recency):
            self._held = {node_id: node for node_id, node in tree.changed.items() if node.state is not None}
        self._reindex()
        if self._bypass and self.used_bytes() <= self.capacity_bytes:
            return 0
        return self._trim(now)

    def _fit(self, end: int, positions: list[int], restart: int) -> int:
        """`end` if the whole path can be held, else the deepest wanted position that can (any, for pure KV)."""
        kv, state = self.model.kv_bytes_per_token, self.model.checkpoint_bytes
        if self.tree.kv_only:
            return min(end, self.capacity_bytes // kv) if kv else end
        for count in range(len(positions), 0, -1):
            if positions[count - 1] * kv + (count + (restart > 0)) * state <= self.capacity_bytes:
                return positions[count - 1]
        return 0

    def _mark(self, position: int, prefill: Prefill, now: float) -> Mark:
        sighting = prefill.sighting
        if sighting is not None:
            if position == prefill.end_tokens:
                mark = sighting.tip
            elif sighting.branch is not None and position == sighting.seen_tokens:
                mark = sighting.branch
            else:
                mark = next((m for at, m in sighting.marks if at == position), None) or Mark(Kind.DECLARED, now)
        else:
            mark = Mark(Kind.FRESH if position == prefill.end_tokens else Kind.BRANCH, now)
        mark.touch = self._tick()
        return mark

    def _adopt(self, leaf: Node, prefill: Prefill, now: float) -> None:
        """Make checkpoints share the history's marks, so that both see one age and class.

        Pure KV has no checkpoints: every node of the path gets a mark instead, and counts as used.
        """
        known = {} if prefill.sighting is None else dict(prefill.sighting.marks)
        node = leaf
        while node.parent is not None:
            if self.tree.kv_only and node.state is None:
                self.tree.attach(node, self._mark(node.end, prefill, now))
            mark = node.state
            if mark is not None:
                shared = known.get(node.end, mark)
                if shared is not mark:
                    shared.touch = max(shared.touch, mark.touch)
                    node.state = shared
                    self.tree.changed[node.id] = node
                if self.tree.kv_only:
                    self._use(node, shared, now)
            node = node.parent

    def _trim(self, now: float) -> int:
        """Evict down to the capacity; what this request made or used goes last, when the rest was not enough."""
        evicted = 0
        while self.used_bytes() > self.capacity_bytes:
            victim = self._index.pop(now)
            if victim is None and self._held:
                self._release()
                continue
            if victim is None:
                raise InvariantError(
                    f"locked entries exceed the capacity of {self.capacity_bytes}: {self.used_bytes()}"
                )
            node = self._nodes.pop(victim)
            if self.feedback is not None and node.state is not None:
                self.feedback.evicted(node.state)
            if self.tree.kv_only:
                over = -(-(self.used_bytes() - self.capacity_bytes) // self.model.kv_bytes_per_token)
                self.tree.trim(node, over)
            else:
                self._drop(node)
            evicted += 1
            self._reindex()
        if self._held:
            self._release()
        return evicted

    def _drop(self, node: Node) -> None:
        """Drop a checkpoint; an older end of the same sequence stands for it from now on."""
        mark = node.state
        if self.history is not None and mark is not None:
            later = mark.heir or mark
            mark.heir = None
            if later.kind is not Kind.BRANCH:
                self._inherit(node.base(), later)
        self.tree.drop(node)

    def _inherit(self, node: Node, later: Mark) -> None:
        mark = node.state
        if mark is not None and mark.kind is Kind.SUPERSEDED and later.last_s >= mark.last_s:
            mark.heir = later
            self.tree.changed[node.id] = node

    def _release(self) -> None:
        """Make what this request made or used evictable again."""
        for node in self._held.values():
            self.tree.changed[node.id] = node
        self._held = {}
        self._reindex()

    def _reindex(self) -> None:
        """Put or discard every node the tree reports as changed, and those priced relative to it.

        At most `REPRICED_DESCENDANTS` of the latter: below a branch of many more, the rest keeps an older price until
        it changes itself.
        """
        tree = self.tree
        if tree.rebased:
            stack = [node for node in tree.rebased.values() if node.parent is not None]
            budget = REPRICED_DESCENDANTS
            while stack and budget:
                node = stack.pop()
                budget -= 1
                tree.changed[node.id] = node
                if node.state is None:
                    stack.extend(node.children.values())
            tree.rebased.clear()
        if tree.changed:
            put = self._put
            for node in tree.changed.values():
                put(node)
            tree.changed.clear()

    def _put(self, node: Node) -> None:
        node_id = node.id
        evictable = not node.children if self.tree.kv_only else node.state is not None
        if not evictable or node.parent is None or node.locks or node_id in self._held:
            if self._nodes.pop(node_id, None) is not None:
                self._index.discard(node_id)
            return
        self._nodes[node_id] = node
        self._index.put(candidate(node))

    def check(self) -> None:
        """Raise InvariantError where tree, index, history and budget disagree."""
        check_tree(self.tree)
        self._index.check()
        kv_only = self.tree.kv_only
        live = {n.id for n in walk(self.tree) if not n.locks and (n.is_leaf if kv_only else n.state is not None)}
        expect(live == set(self._nodes), "evictable nodes", len(self._nodes), len(live))
        expect(self.used_bytes() <= self.capacity_bytes, "bytes", self.used_bytes(), self.capacity_bytes)
        if self.history is not None:
            self.history.check()
        if self.guard is not None:
            self.guard.check()


def candidate(node: Node) -> Candidate:
    """`node` as an eviction policy sees it."""
    mark, parent = node.state, node.parent
    if parent is None:
        raise InvariantError(f"the root is not evictable: node {node.id}")
    base = parent if parent.state is not None else node.base()
    children = len(node.children)
    end, parent_end = node.end, parent.end
    freed = 0 if children else end - parent_end
    if mark is None:
        return Candidate(node.id, end, base.end, parent_end, freed, 0, children, node.last_s, 0, 0, False, 0)
    use = mark.heir or mark
    # as in `RadixTree._walk`: `Candidate(...)` takes several times as long
    return tuple.__new__(Candidate, (
        node.id, end, base.end, parent_end, freed, 1, children,
        use.last_s, mark.touch, mark.hits, use.kind is Kind.SUPERSEDED, use.reuse_class,
    ))  # fmt: skip
