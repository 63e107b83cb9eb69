"""Re-derive every counter of a radix tree and verify its normal form."""

from collections.abc import Iterator

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.radix_tree import RadixTree
from sglang_hybrid.prefix.tree.tokens import TOKEN_BYTES


def walk(tree: RadixTree) -> Iterator[Node]:
    """Every node but the root, parents before children."""
    stack = list(tree.root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def check(tree: RadixTree) -> None:
    """Raise InvariantError where the tree contradicts its counters, links or normal form."""
    nodes = kv_tokens = states = 0
    for node in walk(tree):
        nodes += 1
        kv_tokens += len(node.raw) // TOKEN_BYTES
        states += node.state is not None
        _check_node(node, tree)
    expect(nodes == tree.nodes, "node count", tree.nodes, nodes)
    expect(kv_tokens == tree.kv_tokens, "KV tokens", tree.kv_tokens, kv_tokens)
    expect(states == tree.states, "checkpoints", tree.states, states)


def _check_node(node: Node, tree: RadixTree) -> None:
    parent = node.parent
    tokens = node.tokens
    if parent is None or tokens.size == 0:
        raise InvariantError(f"a node in the tree has a parent and an edge: node {node.id}")
    expect(
        parent.children.get(tokens.item(0)) is node and node.first == tokens.item(0), "child link", node.id, parent.id
    )
    expect(node.end == parent.end + tokens.size, "end position", node.end, parent.end)
    expect(node.locks == node.pins + sum(c.locks for c in node.children.values()), "locks", node.locks, node.pins)
    keeps = node.state is not None or len(node.children) > 1 or node.pins > 0 or tree.kv_only or not tree.settles
    expect(keeps, "normal form: a node without a reason to exist", node.id, node.end)


def expect(holds: bool, what: str, have: object, derived: object) -> None:
    """Raise InvariantError naming `what`, the stored and the derived value unless `holds`."""
    if not holds:
        raise InvariantError(f"{what} disagrees with the structure, stored {have}, derived {derived}")
