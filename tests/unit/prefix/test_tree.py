"""The hybrid radix tree: matching, splitting, separable checkpoints and KV, locks."""

from collections import defaultdict

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.prefix.tree.check import check, walk
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.radix_tree import RadixTree
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens

MARKS: defaultdict[str, Mark] = defaultdict(lambda: Mark(Kind.FRESH, 0.0))
"""The mark of each checkpoint, by the path to it."""


def seq(text: str) -> Tokens:
    return as_tokens([ord(letter) for letter in text])


def grown(*paths: str, kv_only: bool = False) -> RadixTree:
    """A tree with a checkpoint (whose mark is MARKS of its path) at the end of each of `paths`."""
    tree: RadixTree = RadixTree(kv_only)
    for path in paths:
        node = tree.insert(seq(path), 0.0)
        if not kv_only:
            tree.attach(node, MARKS[path])
        check(tree)
    return tree


def test_match_resumes_at_the_deepest_checkpoint_and_knows_deeper_kv() -> None:
    tree = grown("abcdef", "abc")
    found = tree.match(seq("abcdxx"))
    assert (found.kv_tokens, found.resume_tokens) == (4, 3)
    assert found.resume_node.state is MARKS["abc"]
    assert tree.match(seq("abcdef"), limit=5).resume_tokens == 3
    assert tree.match(seq("x")).resume_node is tree.root


def test_a_partial_edge_is_never_a_resume_point() -> None:
    tree = grown("abcdef")
    found = tree.match(seq("abcdeX"))
    assert (found.kv_tokens, found.resume_tokens) == (5, 0)
    assert found.partial is not None


def test_pure_transformer_resumes_anywhere() -> None:
    tree = grown("abcdef", kv_only=True)
    assert tree.match(seq("abcdeX")).resume_tokens == 5
    assert tree.match(seq("abcdef"), limit=5).resume_tokens == 5


def test_insert_splits_where_sequences_part() -> None:
    tree = grown("abcd", "abxy")
    assert tree.kv_tokens == 6
    assert {id(n.state): n.end for n in walk(tree) if n.state} == {id(MARKS["abcd"]): 4, id(MARKS["abxy"]): 4}
    assert [n.end for n in walk(tree) if n.state is None] == [2]


def test_insert_of_a_known_sequence_returns_its_node() -> None:
    tree = grown("abcd")
    assert tree.insert(seq("abcd"), 1.0).state is MARKS["abcd"]
    assert tree.insert(seq(""), 1.0) is tree.root
    assert tree.kv_tokens == 4


def test_insert_from_a_match_equals_insert_from_the_root() -> None:
    tree = grown("abcd")
    leaf = tree.insert(seq("abcdef"), 0.0, found=tree.match(seq("abcd")))
    tree.attach(leaf, MARKS["leaf"])
    check(tree)
    assert leaf.end == 6
    assert tree.kv_tokens == 6


def test_dropped_checkpoint_leaves_kv_to_descendants() -> None:
    tree = grown("ab", "abcd", "abxy")
    freed = tree.drop(tree.match(seq("ab")).resume_node)
    assert (freed.kv_tokens, freed.states) == (0, [MARKS["ab"]])
    assert tree.match(seq("abcd")).resume_tokens == 4
    check(tree)


def test_single_child_absorbs_the_kv_of_a_dropped_checkpoint() -> None:
    tree = grown("ab", "abcd")
    tree.drop(tree.match(seq("ab")).resume_node)
    assert [(n.start, n.end, n.state) for n in walk(tree)] == [(0, 4, MARKS["abcd"])]
    check(tree)


def test_dropping_the_last_checkpoint_below_a_branch_frees_kv_up_to_it() -> None:
    tree = grown("abcd", "abxy")
    freed = tree.drop(tree.match(seq("abcd")).resume_node)
    assert freed.kv_tokens == 2
    assert [(n.start, n.end) for n in walk(tree)] == [(0, 4)]
    freed = tree.drop(tree.match(seq("abxy")).resume_node)
    assert (freed.kv_tokens, tree.kv_tokens, tree.nodes) == (4, 0, 0)
    check(tree)


def test_locked_path_survives_and_settles_on_unlock() -> None:
    tree = grown("ab", "abcd")
    leaf = tree.match(seq("abcd")).resume_node
    tree.lock(leaf)
    assert tree.drop(leaf).kv_tokens == 0, "a lock holds the KV; the state may go"
    assert tree.match(seq("abcd")).kv_tokens == 4
    check(tree)
    assert tree.unlock(leaf).kv_tokens == 2
    assert tree.match(seq("abcd")).kv_tokens == 2
    check(tree)


def test_a_tree_that_does_not_settle_keeps_its_nodes_until_they_are_cut() -> None:
    tree: RadixTree = RadixTree(settles=False)
    leaf = tree.insert(seq("abcd"), 0.0)
    tree.attach(leaf, Mark(Kind.FRESH, 0.0))
    upper = tree.split(leaf, 2)
    tree.drop(leaf)
    check(tree)
    assert (tree.nodes, tree.kv_tokens, tree.states) == (2, 4, 0)
    with pytest.raises(InvariantError, match="leaf"):
        tree.cut(upper)
    assert tree.cut(leaf).kv_tokens == 2
    tree.lock(upper)
    with pytest.raises(InvariantError, match="unlocked"):
        tree.cut(upper)
    tree.unlock(upper)
    tree.cut(upper)
    assert (tree.nodes, tree.kv_tokens) == (0, 0)


def test_pinned_node_without_checkpoint_is_freed_by_the_last_unlock() -> None:
    tree: RadixTree = RadixTree()
    node = tree.insert(seq("abc"), 0.0)
    tree.lock(node)
    tree.lock(node)
    check(tree)
    assert tree.unlock(node).kv_tokens == 0
    assert tree.unlock(node).kv_tokens == 3
    assert tree.nodes == 0


def test_unlock_without_a_lock_and_lock_of_a_dead_node_are_refused() -> None:
    tree = grown("ab")
    node = tree.match(seq("ab")).resume_node
    with pytest.raises(ConfigError, match="unlock"):
        tree.unlock(node)
    tree.drop(node)
    with pytest.raises(ConfigError, match="left the tree"):
        tree.lock(node)


def test_misuse_is_an_invariant_error() -> None:
    tree = grown("abcd")
    node = tree.match(seq("abcd")).resume_node
    with pytest.raises(InvariantError):
        tree.attach(node, MARKS["again"])
    with pytest.raises(InvariantError):
        tree.attach(tree.root, MARKS["root"])
    with pytest.raises(InvariantError):
        tree.split(node, 4)
    with pytest.raises(InvariantError):
        tree.node_at(node, 5)
    with pytest.raises(InvariantError):
        tree.trim(node, 1)


def test_trim_cuts_a_pure_kv_leaf_from_its_end() -> None:
    tree = grown("abcdef", kv_only=True)
    leaf = tree.match(seq("abcdef")).node
    assert tree.trim(leaf, 2).kv_tokens == 2
    assert tree.match(seq("abcdef")).resume_tokens == 4
    check(tree)
    assert tree.trim(leaf, 9).kv_tokens == 4
    assert tree.nodes == 0
    check(tree)


def test_a_thousand_splits_stay_within_twice_the_tokens() -> None:
    rng = np.random.default_rng(5)
    tree: RadixTree = RadixTree()
    long = rng.integers(0, 50, 4000).astype(np.int32)
    leaf = tree.insert(long, 0.0)
    tree.attach(leaf, MARKS["leaf"])
    for position in rng.permutation(np.arange(1, 4000))[:1000]:
        node = tree.node_at(leaf, int(position))
        tree.attach(node, MARKS["node"])
    check(tree)
    for node in list(walk(tree)):
        if node is not leaf:
            tree.drop(node)
    check(tree)
    assert tree.nodes == 1


@pytest.mark.parametrize("damage", ["kv_tokens", "states", "nodes"])
def test_check_finds_a_wrong_counter(damage: str) -> None:
    tree = grown("abcd", "abxy")
    setattr(tree, damage, getattr(tree, damage) + 1)
    with pytest.raises(InvariantError):
        check(tree)


def test_check_finds_a_node_without_a_reason() -> None:
    tree = grown("abcd")
    tree.split(tree.match(seq("abcd")).node, 2)
    with pytest.raises(InvariantError, match="normal form"):
        check(tree)
