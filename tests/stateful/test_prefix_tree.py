"""Random walks over the radix tree against a model that stores whole sequences."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_hybrid.prefix.tree.check import check, walk
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.radix_tree import RadixTree
from sglang_hybrid.prefix.tree.tokens import as_tokens

SEQUENCES = st.lists(st.integers(0, 2), max_size=10)


def path(node: Node) -> tuple[int, ...]:
    edges: list[int] = []
    while node.parent is not None:
        edges = node.tokens.tolist() + edges
        node = node.parent
    return tuple(edges)


class TreeMachine(RuleBasedStateMachine):
    """The model: the set of checkpointed sequences, and the multiset of locked ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree = RadixTree()
        self.checkpoints: set[tuple[int, ...]] = set()
        self.locked: list[Node] = []

    @rule(tokens=SEQUENCES)
    def insert(self, tokens: list[int]) -> None:
        node = self.tree.insert(as_tokens(tokens), 0.0)
        if tokens and node.state is None:
            self.tree.attach(node, Mark(Kind.FRESH, 0.0))
        if tokens:
            self.checkpoints.add(tuple(tokens))

    @rule(tokens=SEQUENCES, position=st.integers(1, 10))
    def checkpoint_on_the_path(self, tokens: list[int], position: int) -> None:
        below = self.tree.match(as_tokens(tokens)).node
        if position > below.end:
            return
        node = self.tree.node_at(below, position)
        if node.state is None:
            self.tree.attach(node, Mark(Kind.FRESH, 0.0))
        self.checkpoints.add(tuple(tokens[:position]))

    @precondition(lambda self: self.checkpoints)
    @rule(choice=st.integers(0, 10**6))
    def drop(self, choice: int) -> None:
        chosen = sorted(self.checkpoints)[choice % len(self.checkpoints)]
        node = self.tree.match(as_tokens(list(chosen))).resume_node
        assert path(node) == chosen
        before = self.tree.kv_tokens
        freed = self.tree.drop(node)
        self.checkpoints.discard(chosen)
        assert freed.kv_tokens == before - self.tree.kv_tokens

    @rule(tokens=SEQUENCES)
    def lock(self, tokens: list[int]) -> None:
        node = self.tree.match(as_tokens(tokens)).node
        self.tree.lock(node)
        self.locked.append(node)

    @precondition(lambda self: self.locked)
    @rule(choice=st.integers(0, 10**6))
    def unlock(self, choice: int) -> None:
        self.tree.unlock(self.locked.pop(choice % len(self.locked)))

    @rule(tokens=SEQUENCES)
    def match_is_honest(self, tokens: list[int]) -> None:
        found = self.tree.match(as_tokens(tokens))
        prefixes = [tuple(tokens[:n]) for n in range(len(tokens) + 1)]
        assert found.resume_tokens == max(len(p) for p in prefixes if not p or p in self.checkpoints)
        held = {path(n)[:end] for n in walk(self.tree) for end in range(n.end + 1)} | {()}
        assert found.kv_tokens == max(len(p) for p in prefixes if p in held)

    @invariant()
    def consistent(self) -> None:
        check(self.tree)
        assert {path(n) for n in walk(self.tree) if n.state is not None} == self.checkpoints
        assert all(node.parent is not None or node is self.tree.root for node in self.locked)


class PureKvMachine(RuleBasedStateMachine):
    """A pure Transformer's tree: the model is the set of all held prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree = RadixTree(kv_only=True)
        self.held: set[tuple[int, ...]] = set()

    @initialize()
    def start(self) -> None:
        self.held.add(())

    @rule(tokens=SEQUENCES)
    def insert(self, tokens: list[int]) -> None:
        self.tree.insert(as_tokens(tokens), 0.0)
        self.held.update(tuple(tokens[:n]) for n in range(len(tokens) + 1))

    @precondition(lambda self: self.tree.nodes)
    @rule(choice=st.integers(0, 10**6), tokens=st.integers(0, 12))
    def trim(self, choice: int, tokens: int) -> None:
        leaves = sorted((path(n), n.id, n) for n in walk(self.tree) if n.is_leaf)
        sequence, _, leaf = leaves[choice % len(leaves)]
        cut = min(tokens, int(leaf.tokens.size))
        assert self.tree.trim(leaf, tokens).kv_tokens == cut
        self.held -= {sequence[:n] for n in range(len(sequence) - cut + 1, len(sequence) + 1)}

    @rule(tokens=SEQUENCES)
    def every_held_token_is_a_resume_point(self, tokens: list[int]) -> None:
        deepest = max(n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in self.held)
        assert self.tree.match(as_tokens(tokens)).resume_tokens == deepest

    @invariant()
    def consistent(self) -> None:
        check(self.tree)
        assert self.tree.kv_tokens == len(self.held) - 1


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40)
TestPureKv = PureKvMachine.TestCase
TestPureKv.settings = settings(max_examples=50, stateful_step_count=30)
