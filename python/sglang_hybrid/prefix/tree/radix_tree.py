"""The hybrid radix tree: edges carry KV, nodes may carry a checkpoint of the recurrent state.

Normal form, restored by every public method (see `check`): a node stays only if it carries a checkpoint, or has two or
more children, or is pinned (or the tree is `kv_only`: KV is reason enough). So KV below the last checkpoint is freed,
a checkpoint can go while its KV stays for descendants, and the KV of a node with neither checkpoint nor second child is
absorbed by its child. A pure Transformer is `kv_only=True` (resume anywhere); a pure SSM is the same tree with KV
priced at zero. With `settles=False` nodes stay as they are until they are `cut`: that is SGLang's tree.

The tree decides nothing and prices nothing. It counts (`kv_tokens`, `states`), returns what was freed, and names what
changed since the caller last cleared it: in `changed` the nodes with other children, checkpoint, edge or locks, in
`rebased` the topmost nodes below which the nearest checkpoint above is another one (`REBASED_CHILDREN` per change).
"""

from itertools import islice
from typing import final

from mypy_extensions import mypyc_attr

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.tokens import TOKEN_BYTES, Tokens, common_prefix

REBASED_CHILDREN = 32


@final
@mypyc_attr(acyclic=True)
class Match:
    """Where a walk ended: `kv_tokens` tokens are in the tree, prefill can resume at `resume_tokens` <= `kv_tokens`.

    `node` is the deepest node that matched completely, `partial` the child whose edge matched only in part (or None),
    `resume_node` the node whose checkpoint ends at `resume_tokens` (the root at 0; for `kv_only` the node holding it).
    """

    __slots__ = ("kv_tokens", "node", "partial", "resume_node", "resume_tokens")

    def __init__(self, kv_tokens: int, resume_tokens: int, node: Node, partial: Node | None, resume_node: Node) -> None:
        self.kv_tokens = kv_tokens
        self.resume_tokens = resume_tokens
        self.node = node
        self.partial = partial
        self.resume_node = resume_node


class Freed:
    """What an operation gave back: KV tokens, checkpoints."""

    __slots__ = ("kv_tokens", "states")

    def __init__(self, kv_tokens: int = 0) -> None:
        self.kv_tokens = kv_tokens
        self.states: list[Mark] = []


class RadixTree:
    """A radix tree over int32 token ids; every method is O(path length + tokens compared or cut)."""

    def __init__(self, kv_only: bool = False, settles: bool = True) -> None:
        self.kv_only = kv_only
        self.settles = settles
        self.root: Node = Node(0, b"", -1, 0, None, 0.0)
        self.kv_tokens = 0
        self.states = 0
        self.nodes = 0
        self.changed: dict[int, Node] = {}
        self.rebased: dict[int, Node] = {}
        self._next_id = 1

    def match(self, tokens: Tokens, limit: int | None = None) -> Match:
        """The longest prefix of `tokens` in the tree, and the deepest resume point <= `limit`; reads only."""
        return self._walk(tokens, tokens.size if limit is None else limit, self.root, self.root)

    def _walk(self, tokens: Tokens, limit: int, node: Node, resume_node: Node) -> Match:
        """The match of `tokens`, which `node` is known to match completely, with `resume_node` at or above it."""
        partial = None
        position, size = node.end, tokens.size
        raw = b""
        while position < size:
            child = node.children.get(tokens.item(position))
            if child is None:
                break
            raw = raw or tokens.tobytes()
            if not raw.startswith(child.raw, position * TOKEN_BYTES):
                edge = child.tokens
                position += common_prefix(edge, tokens[position : position + edge.size])
                partial = child
                break
            node = child
            position = node.end
            if node.state is not None and position <= limit:
                resume_node = node
        if not self.kv_only:
            return Match(position, resume_node.end, node, partial, resume_node)
        return Match(position, min(position, limit), node, partial, partial or node)

    def insert(self, tokens: Tokens, now: float, found: Match | None = None) -> Node:
        """The node that ends exactly at `tokens`, created (with KV on the missing part) if need be; the root if empty.

        `found`, a match of a prefix of `tokens` whose node is still in the tree, saves walking that prefix again.
        Without a checkpoint or a pin the new leaf is
        not in normal form: the caller attaches a state, pins it, or calls `settle`.
        """
        node = self.root if found is None else found.node
        found = self._walk(tokens, 0, node, self.root)
        node = found.node
        start = node.end
        if found.partial is not None:
            node = self.split(found.partial, found.kv_tokens)
            start = node.end
        if start == tokens.size:
            return node
        leaf: Node = Node(self._next_id, tokens[start:].tobytes(), tokens.item(start), tokens.size, node, now)
        self._next_id += 1
        node.adopt(leaf)
        self.nodes += 1
        self.kv_tokens += leaf.end - start
        self.changed[node.id] = node
        self.changed[leaf.id] = leaf
        return leaf

    def lengthen(self, leaf: Node, tokens: Tokens) -> None:
        """Let `tokens` follow upon a leaf, whose checkpoint is at their end then; KV is only counted."""
        if leaf.parent is None or leaf.children:
            raise InvariantError(f"only a live leaf can be lengthened: node {leaf.id}")
        leaf.raw += tokens.tobytes()
        leaf.end += tokens.size
        self.kv_tokens += tokens.size
        self.changed[leaf.id] = leaf

    def split(self, node: Node, position: int) -> Node:
        """Cut the edge of `node` at `position` and return the new upper node, which has no checkpoint and no pin.

        The caller gives the upper node a reason to exist (a checkpoint, a second child) or calls `settle`.
        """
        cut = position - node.start
        parent = node.parent
        if parent is None or not 0 < cut < len(node.raw) // TOKEN_BYTES:
            raise InvariantError(f"split inside an edge, ({node.start}, {node.end}): {position}")
        upper: Node = Node(self._next_id, node.raw[: cut * TOKEN_BYTES], node.first, position, parent, node.last_s)
        self._next_id += 1
        self.nodes += 1
        upper.locks = node.locks
        parent.children[upper.first] = upper
        node.first = node.tokens.item(cut)
        node.raw = node.raw[cut * TOKEN_BYTES :]
        node.parent = upper
        upper.adopt(node)
        self.changed[node.id] = node
        self.changed[upper.id] = upper
        return upper

    def node_at(self, below: Node, position: int) -> Node:
        """The node ending at `position` on the path to `below`, split off if need be (then as after `split`)."""
        if not 0 <= position <= below.end:
            raise InvariantError(f"a position on the path lies in [0, {below.end}]: {position}")
        node = below
        while node.parent is not None and node.parent.end >= position:
            node = node.parent
        return node if node.end == position else self.split(node, position)

    def attach(self, node: Node, state: Mark) -> None:
        """Store a checkpoint at `node`; raises InvariantError at the root or where one exists."""
        if node.parent is None or node.state is not None:
            raise InvariantError(f"a checkpoint needs a live node without one: node {node.id}")
        node.state = state
        self.states += 1
        self.changed[node.id] = node
        self._rebase(node)

    def lock(self, node: Node) -> None:
        """Protect `node` and the KV of its whole path until `unlock`; may be nested. Its checkpoint may be dropped."""
        self._require_live(node)
        node.pins += 1
        self._add_locks(node, 1)

    def unlock(self, node: Node) -> Freed:
        """Undo one `lock` and free KV that nothing needs any more; raises ConfigError without a matching lock."""
        if node.pins == 0:
            raise ConfigError(f"unlock needs a lock on the same node before it: node {node.id}")
        node.pins -= 1
        self._add_locks(node, -1)
        return self.settle(node)

    def drop(self, node: Node) -> Freed:
        """Free the checkpoint of `node` and all KV that no checkpoint, branch or lock needs then.

        `kv_only`: free the leaf's edge instead. Raises InvariantError if that is locked or there is nothing to drop.
        """
        if node.parent is None or (not (self.kv_only and node.is_leaf and not node.locks) and node.state is None):
            raise InvariantError(f"only a checkpoint (or unlocked leaf KV) can be dropped: node {node.id}")
        freed: Freed = Freed()
        if node.state is not None:
            freed.states.append(node.state)
            node.state = None
            self.states -= 1
            self.changed[node.id] = node
            self._rebase(node)
        if self.kv_only and node.is_leaf and not node.locks:
            self._remove_leaf(node, freed)
        else:
            self._settle(node, freed)
        return freed

    def cut(self, leaf: Node) -> Freed:
        """Free an unlocked leaf, its checkpoint and its edge; raises InvariantError for other nodes."""
        if leaf.parent is None or leaf.locks or leaf.children:
            raise InvariantError(f"only an unlocked leaf can be cut: node {leaf.id}")
        freed: Freed = Freed()
        if leaf.state is not None:
            freed.states.append(leaf.state)
            leaf.state = None
            self.states -= 1
        self._remove_leaf(leaf, freed)
        return freed

    def trim(self, leaf: Node, kv_tokens: int) -> Freed:
        """Free the last `kv_tokens` tokens of an unlocked leaf (`kv_only`), and the leaf itself if that is all."""
        if not self.kv_only or leaf.locks or leaf.parent is None or leaf.children or kv_tokens < 0:
            raise InvariantError(f"only an unlocked leaf of a kv_only tree can be trimmed: node {leaf.id}")
        keep = len(leaf.raw) // TOKEN_BYTES - kv_tokens
        if keep <= 0:
            return self.drop(leaf)
        freed: Freed = Freed(kv_tokens)
        leaf.raw = leaf.raw[: keep * TOKEN_BYTES]
        leaf.end -= kv_tokens
        self.kv_tokens -= kv_tokens
        self.changed[leaf.id] = leaf
        return freed

    def settle(self, node: Node) -> Freed:
        """Bring `node` and its ancestors back to normal form and return what that freed."""
        freed: Freed = Freed()
        self._settle(node, freed)
        return freed

    def _settle(self, node: Node, freed: Freed) -> None:
        if node.parent is None or node.state is not None or node.pins or not self.settles:
            return
        children = node.children
        if not children:
            if not self.kv_only:
                self._remove_leaf(node, freed)
        elif len(children) == 1:
            self._absorb(node, next(iter(children.values())))

    def _remove_leaf(self, leaf: Node, freed: Freed) -> None:
        parent = leaf.parent
        if parent is None:
            raise InvariantError(f"the root cannot be removed: node {leaf.id}")
        del parent.children[leaf.first]
        self._forget(leaf)
        size = leaf.end - parent.end
        self.kv_tokens -= size
        freed.kv_tokens += size
        self.changed[parent.id] = parent
        if not (self.kv_only and parent.is_leaf):
            self._settle(parent, freed)

    def _absorb(self, upper: Node, child: Node) -> None:
        """Move the KV of `upper` into its single child; `upper` leaves the tree."""
        parent = upper.parent
        if parent is None:
            raise InvariantError(f"the root cannot be absorbed: node {upper.id}")
        child.raw = upper.raw + child.raw
        child.first = upper.first
        child.parent = parent
        parent.children[child.first] = child
        self._forget(upper)
        self.changed[child.id] = child

    def __del__(self) -> None:
        """Take the nodes apart, which point to each other and are not garbage collected."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.parent = None
            node.disown()

    def _forget(self, node: Node) -> None:
        node.parent = None
        node.disown()
        self.nodes -= 1
        self.changed[node.id] = node

    def _rebase(self, node: Node) -> None:
        if node.children:
            for child in islice(node.children.values(), REBASED_CHILDREN):
                self.rebased[child.id] = child

    def _add_locks(self, node: Node, by: int) -> None:
        at: Node | None = node
        while at is not None:
            at.locks += by
            self.changed[at.id] = at
            at = at.parent

    def _require_live(self, node: Node) -> None:
        if node.parent is None and node is not self.root:
            raise ConfigError(f"match again, this node has left the tree: node {node.id}")
