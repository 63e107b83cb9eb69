"""What LRU would hold now: the resume points it would have kept, without their KV and states.

It is offered every state that is saved, holds as much as the cache itself may hold, and drops what was used longest
ago: the state resumed from longest ago or, where KV alone is short, the leaf whose path was used longest ago. So of
every request it is known how many tokens LRU would have served, whatever the cache itself has dropped.
"""

from collections import OrderedDict

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.tree.check import check as check_tree
from sglang_hybrid.prefix.tree.check import expect, walk
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.radix_tree import Match, RadixTree
from sglang_hybrid.prefix.tree.tokens import Tokens

UNLIMITED = 1 << 62


class ShadowLru:
    """The metadata of an LRU cache whose token of KV takes `kv_bytes` and whose state `state_bytes` (0: KV alone).

    `turnovers` counts how often as much was saved as is held, in states or in tokens, whichever is more.
    """

    def __init__(self, kv_bytes: int, state_bytes: int) -> None:
        self._kv_only = state_bytes == 0
        self._kv_bytes, self._state_bytes = kv_bytes, state_bytes
        self.tree: RadixTree = RadixTree(self._kv_only)
        self._states: OrderedDict[int, Node] = OrderedDict()  # the one resumed from longest ago first
        self._paths: OrderedDict[int, Node] = OrderedDict()  # the same for any use of their path, leaves first
        self._mark = Mark(Kind.FRESH, 0.0)  # stands for every state
        self.turnovers = 0.0

    def match(self, tokens: Tokens, limit: int) -> Match:
        """What LRU would find of `tokens`, resuming at most at `limit`; counts as their last use."""
        found = self.tree.match(tokens, limit)
        node = found.resume_node
        if not self._kv_only and node.parent is not None:
            self._states.move_to_end(node.id)
        self._use_path(node)
        return found

    def save(self, tokens: Tokens, positions: list[int], above: Node | None = None) -> Node | None:
        """States at `positions` of `tokens`, ascending, are saved; of KV alone everything up to the last of them.

        `above`, a node that was on this path, saves walking to it if it is still there. Returns the last node.
        """
        if not positions:
            return above
        tree = self.tree
        states, kv_tokens = tree.states, tree.kv_tokens
        if above is None or above.parent is None or above.end > positions[-1]:
            above = tree.root
        found = Match(above.end, 0, above, None, above)
        leaf = tree.insert(tokens[: positions[-1]], 0.0, found=found)
        if not self._kv_only:
            for at in positions:
                node = leaf if at == leaf.end else tree.node_at(leaf, at)
                if node.state is None:
                    tree.attach(node, self._mark)
                self._states[node.id] = node
                self._states.move_to_end(node.id)
        self._use_path(leaf)
        self._settle()
        states, kv_tokens = tree.states - states, tree.kv_tokens - kv_tokens
        self.turnovers += max(states / max(tree.states, 1), kv_tokens / max(tree.kv_tokens, 1))
        return leaf

    def _use_path(self, node: Node) -> None:
        """From below upwards, so that nothing is older than what lies below it: the oldest has nothing below."""
        paths = self._paths
        while node.parent is not None:
            if node.state is not None or self._kv_only:
                paths[node.id] = node
                paths.move_to_end(node.id)
            node = node.parent

    def fit(self, states: int = UNLIMITED, kv_tokens: int = UNLIMITED, held_bytes: int = UNLIMITED) -> None:
        """Drop what was used longest ago until no more is held than that."""
        tree, paths = self.tree, self._paths
        while paths:
            over = tree.kv_tokens * self._kv_bytes + tree.states * self._state_bytes - held_bytes
            if self._kv_only:
                short = max(tree.kv_tokens - kv_tokens, -(-over // self._kv_bytes) if self._kv_bytes else 0)
                if short <= 0:
                    break
                tree.trim(next(iter(paths.values())), short)
                self._settle()
                continue
            if over > 0 or tree.states > states:
                node = next(iter(self._states.values()))
            elif tree.kv_tokens > kv_tokens:
                node = next(iter(paths.values()))
            else:
                break
            del self._states[node.id], paths[node.id]
            tree.drop(node)
            self._settle()

    def clear(self) -> None:
        """The cache was emptied."""
        self.tree = RadixTree(self._kv_only)
        self._states.clear()
        self._paths.clear()

    def _settle(self) -> None:
        tree = self.tree
        if self._kv_only:  # otherwise only nodes without a state leave by themselves
            for node in tree.changed.values():
                if node.parent is None:
                    self._paths.pop(node.id, None)
        tree.changed.clear()
        tree.rebased.clear()

    def check(self) -> None:
        """Raise InvariantError where the tree and the two orders disagree."""
        check_tree(self.tree)
        held = {node.id for node in walk(self.tree) if node.state is not None or self._kv_only}
        expect(set(self._paths) == held, "nodes in order of their paths", len(self._paths), len(held))
        expect(set(self._states) == (set() if self._kv_only else held), "states", len(self._states), len(held))
        seen: set[int] = set()
        for node in self._paths.values():
            above = node.parent
            while above is not None:
                if above.id in seen:
                    raise InvariantError(f"a path is older than what lies below it: node {above.id}")
                above = above.parent
            seen.add(node.id)
