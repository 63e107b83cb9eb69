"""What readers of events know of a cache with a host tier is what it holds, in either tier, whatever moved."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.routing.index import RestartIndex, block_hashes
from tests.engine.resume import TieredTree
from tests.engine.test_cache_tree import sequences

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::Warning:sglang"),
    pytest.mark.skipif(not compat.complete(), reason="other versions are refused"),
]

DEVICE, HOST = "GPU", "CPU_PINNED"


def path(node: Any) -> list[int]:
    tokens: list[int] = []
    while node.parent is not None:
        tokens = [*node.key.raw_token_ids(), *tokens]
        node = node.parent
    return tokens


def held(tree: TieredTree) -> dict[str, dict[str, set[int]]]:
    """Names of pages with KV and with a state behind them, by medium, as the tree has them."""
    found: dict[str, dict[str, set[int]]] = {"kv": {DEVICE: set(), HOST: set()}, "states": {DEVICE: set(), HOST: set()}}
    for node in tree.core._node_arena.values():
        if node.parent is None:
            continue
        names = block_hashes(path(node), tree.page_size)[-(len(node.key) // tree.page_size) :]
        kv, state = node.component_data[tree.types["kv"]], node.component_data[tree.types["state"]]
        for medium, value, its_state in ((DEVICE, kv.value, state.value), (HOST, kv.host_value, state.host_value)):
            if value is not None:
                found["kv"][medium].update(names)
            if its_state is not None:
                found["states"][medium].add(names[-1])
    return found


def known(index: RestartIndex) -> dict[str, dict[str, set[int]]]:
    return {
        kind: {medium: set(by_medium.get(medium, {})) for medium in (DEVICE, HOST)}
        for kind, by_medium in (("kv", index._blocks), ("states", index._states))
    }


def hear(tree: TieredTree, index: RestartIndex) -> int:
    """Apply what the tree told since the last call, as it comes over the wire."""
    events = msgspec.msgpack.decode(msgspec.msgpack.encode(tree.cache.take_events()))
    assert all(index.apply("one", event) for event in events)
    return len(events)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("page", [1, 64])
def test_an_index_holds_what_the_tree_holds(page: int, write_policy: str) -> None:
    size = {"tokens": 4096 if page > 1 else 600, "states": 8, "page_size": page}
    tree = TieredTree("forecast", **size, host_ratio=1.5, write_policy=write_policy, events="states")
    rng, index = random.Random(page), RestartIndex(page)
    hosted = loaded = 0
    for _ in range(400):
        tree.clock.advance(rng.choice((0.0, 0.5, 30.0)))
        if rng.random() < 0.5:
            tree.insert(sequences(rng, page))
        elif len(tree.running) < 7:
            loaded += tree.resume(sequences(rng, page), runs=rng.random() < 0.4)[1]
        if tree.running and rng.random() < 0.25:
            tree.end(rng.randrange(len(tree.running)))
        if rng.random() < 0.8:
            tree.step()
        hear(tree, index)
        there = held(tree)
        assert known(index)["states"] == there["states"]
        assert known(index)["kv"][DEVICE] == there["kv"][DEVICE]
        hosted += len(there["states"][HOST] - there["states"][DEVICE])
    tree.step()
    tree.step()
    hear(tree, index)
    assert known(index)["kv"][HOST] == held(tree)["kv"][HOST], "of KV SGLang tells when its copy has ended"
    assert hosted > 300
    assert loaded > 300


@pytest.mark.parametrize("page", [1, 64])
def test_a_snapshot_is_of_both_tiers(page: int) -> None:
    from sglang_hybrid.engine.cache import state_events

    size = {"tokens": 4096 if page > 1 else 600, "states": 8, "page_size": page}
    tree = TieredTree("forecast", **size, host_ratio=2, events="states")
    rng, index = random.Random(2), RestartIndex(page)
    for _ in range(100):
        tree.insert(sequences(rng, page))
        tree.step()
    tree.step()
    tree.cache.take_events()
    state_events._asked.set()
    while hear(tree, index):
        pass
    there = held(tree)
    assert known(index) == there
    assert there["states"][HOST] - there["states"][DEVICE], "some are in host memory alone"


def test_what_is_foretold_is_loaded_back() -> None:
    tree = TieredTree("forecast", tokens=600, states=6, host_ratio=4, events="states")
    index, rng, from_host = RestartIndex(1), random.Random(4), 0
    for number in range(200):
        tokens = sequences(rng, 1)
        prompt = [*tokens, 10_000 + number]  # the last token of a prompt is never cached
        hear(tree, index)
        foretold = index.reaches(prompt).get("one")
        length, loaded = tree.resume(prompt)
        assert length == (0 if foretold is None else foretold.resume_tokens)
        from_host += loaded > 0
        tree.insert(tokens)
        tree.step()
        tree.step()
    assert from_host > 20
