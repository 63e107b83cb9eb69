"""Re-derive every counter of a radix tree and verify its normal form."""

from collections.abc import Iterator

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.node import Node, S
from sglang_hybrid.prefix.tokens import TOKEN_BYTES
from sglang_hybrid.prefix.tree import RadixTree


def walk(tree: RadixTree[S]) -> Iterator[Node[S]]:
    """Every node but the root, parents before children."""
    stack = list(tree.root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def check(tree: RadixTree[S]) -> None:
    """Raise InvariantError where the tree contradicts its counters, links, normal form or storage bound."""
    nodes = kv_tokens = states = buffer_bytes = 0
    seen_buffers: set[int] = set()
    for node in walk(tree):
        nodes += 1
        kv_tokens += int(node.tokens.size)
        states += node.state is not None
        owner = node.tokens if node.tokens.base is None else node.tokens.base
        if id(owner) not in seen_buffers:
            seen_buffers.add(id(owner))
            buffer_bytes += int(owner.nbytes)
        _check_node(node, tree)
    expect(nodes == tree.nodes, "node count", tree.nodes, nodes)
    expect(kv_tokens == tree.kv_tokens, "KV tokens", tree.kv_tokens, kv_tokens)
    expect(states == tree.states, "checkpoints", tree.states, states)
    expect(buffer_bytes <= 2 * TOKEN_BYTES * kv_tokens, "edge bytes", buffer_bytes, 2 * TOKEN_BYTES * kv_tokens)


def _check_node(node: Node[S], tree: RadixTree[S]) -> None:
    parent = node.parent
    if parent is None or node.tokens.size == 0:
        raise InvariantError(f"a node in the tree has a parent and an edge: node {node.id}")
    expect(parent.children.get(node.tokens.item(0)) is node, "child link", node.id, parent.id)
    expect(node.end == parent.end + node.tokens.size, "end position", node.end, parent.end)
    expect(node.locks == node.pins + sum(c.locks for c in node.children.values()), "locks", node.locks, node.pins)
    expect(node.slots is None or node.slots.size == node.tokens.size, "slots", node.id, node.end)
    keeps = node.state is not None or len(node.children) > 1 or node.pins > 0 or tree.kv_only
    expect(keeps, "normal form: a node without a reason to exist", node.id, node.end)


def expect(holds: bool, what: str, have: object, derived: object) -> None:
    """Raise InvariantError naming `what`, the stored and the derived value unless `holds`."""
    if not holds:
        raise InvariantError(f"{what} disagrees with the structure, stored {have}, derived {derived}")
