"""A snapshot of what a tree holds, told a part at a time while the tree changes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine import compat

pytestmark = pytest.mark.skipif(not compat.at_least("0.5.21"), reason="events of states are refused with this SGLang")


class Node:
    """As much of SGLang's node as a snapshot looks at; `key` is its one page's name, repeated for more."""

    def __init__(self, arena: dict[int, Node], parent: Node | None, pages: list[int], state: bool) -> None:
        self.id = max(arena, default=-1) + 1
        self.parent, self.pages, self.state, self.evicted = parent, pages, state, False
        self.backuped, self.write_through_pending_id = False, None
        arena[self.id] = self

    @property
    def key(self) -> list[int]:
        return self.pages * 4

    def component(self, _: Any) -> Any:
        return SimpleNamespace(value=1 if self.state else None, host_value=None)


class Recorder:
    """Events as a reader applies them: names of pages, and of states."""

    enabled, page_size = True, 4

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.states: set[int] = set()

    def record_store(self, node: Node) -> None:
        assert node.parent is None or node.parent.parent is None or node.parent.pages[-1] in self.pages, "from above"
        self.pages.update(node.pages)

    def _node_event_hash_values(self, node: Node) -> list[str]:
        return [f"{name:016x}" for name in node.pages]

    def enqueue(self, event: Any) -> None:
        self.states.update(event.block_hashes)


@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_of_a_tree_that_changes_misses_nothing_that_stays(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    from sglang_hybrid.engine.cache import state_events

    monkeypatch.setattr(state_events, "RETOLD_PAGES", 3)
    rng, arena, recorder = random.Random(seed), dict[int, Node](), Recorder()
    root = Node(arena, None, [], False)
    names = iter(range(1, 10_000))
    for _ in range(40):
        pages = [next(names) for _ in range(rng.randrange(1, 4))]
        Node(arena, rng.choice(list(arena.values())), pages, rng.random() < 0.5)
    events = state_events.StateEvents(
        SimpleNamespace(tree_core=SimpleNamespace(root_node=root, _node_arena=arena, kv_events=recorder))
    )
    events.retell()
    assert not recorder.pages, "nobody has asked"
    state_events._Listening(
        SimpleNamespace(recv_multipart=lambda: [b"", b"", (2**64 - 2).to_bytes(8, "big")], send_multipart=None)
    ).recv_multipart()
    for _ in range(60):
        events.retell()
        nodes = [node for node in arena.values() if node is not root]
        leaves = [node for node in nodes if all(other.parent is not node for other in nodes)]
        if len(nodes) > 20 and rng.random() < 0.5:  # evicted; it has an event
            gone = rng.choice(leaves)
            del arena[gone.id]
            recorder.pages.difference_update(gone.pages)
            recorder.states.discard(gone.pages[-1])
        long = [node for node in nodes if node.id in arena and len(node.pages) > 1]
        if long:  # split without an event; it goes on as the lower part, and the upper part is new
            split = rng.choice(long)
            at = rng.randrange(1, len(split.pages))
            split.parent = Node(arena, split.parent, split.pages[:at], False)
            split.pages = split.pages[at:]
    assert recorder.pages == {name for node in arena.values() for name in node.pages}
    assert recorder.states == {node.pages[-1] for node in arena.values() if node.state}


def test_who_asks_all_the_time_gets_one_snapshot_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    from sglang_hybrid.engine.cache import state_events

    now = 100.0
    monkeypatch.setattr(state_events, "RETOLD_PAGES", 1)
    monkeypatch.setattr(state_events, "time", SimpleNamespace(monotonic=lambda: now))
    arena, recorder = dict[int, Node](), Recorder()
    root = Node(arena, None, [], False)
    for name in range(1, 6):
        Node(arena, root, [name], True)
    events = state_events.StateEvents(
        SimpleNamespace(tree_core=SimpleNamespace(root_node=root, _node_arena=arena, kv_events=recorder))
    )
    for _ in range(5):
        state_events._asked.set()
        events.retell()
    assert recorder.pages == recorder.states == {1, 2, 3, 4, 5}, "none began anew"
    events.retell()  # the end of it
    recorder.pages.clear()
    for _ in range(9):
        events.retell()
    assert not recorder.pages, "the next one is not due"
    now += state_events.APART_S
    for _ in range(6):
        events.retell()
    assert recorder.pages == {1, 2, 3, 4, 5}
    assert not state_events._asked.is_set()


def test_only_the_number_of_a_snapshot_asks_for_one() -> None:
    pytest.importorskip("sglang")
    from sglang_hybrid.engine.cache import state_events

    state_events._asked.clear()
    sent: list[Any] = []
    frames = [[b"client", b"", number.to_bytes(8, "big")] for number in (0, 7, 2**64 - 1)]
    socket = SimpleNamespace(recv_multipart=lambda: frames.pop(), send_multipart=sent.append)

    def original(view: Any) -> None:
        view._replay.recv_multipart()
        view._replay.send_multipart((b"client", b"", view._of_a_newer_version, view.END_SEQ, b""))

    publisher = SimpleNamespace(_replay=socket, _of_a_newer_version=b"topic", END_SEQ=b"end")
    for _ in range(3):
        state_events.replay(original, publisher)
    assert len(sent) == 3
    assert not state_events._asked.is_set()
