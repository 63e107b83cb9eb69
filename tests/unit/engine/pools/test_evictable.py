"""Counting evictable pages while a tree changes gives what reading all of them gives."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.pools.evictable import EvictableColumns
from sglang_hybrid.memory.sizing import KV
from tests.unit.engine.pools.arenas import opened

PAGE = 4
WHICH = st.integers(0, 1 << 20)


class Tree(RuleBasedStateMachine):
    """Nodes come, are locked, split, change their slots and go; the counts follow, asked now and then."""

    def __init__(self) -> None:
        super().__init__()
        arena, driver = opened(HostDriver, lambda: 0.0, page_tokens=PAGE, total_bytes=1 << 20)
        self.pool = arena.supplies[KV].pool
        arena.pooled.close()
        driver.close()
        self.evictable = EvictableColumns(self.pool, PAGE)
        self.free = list(np.random.default_rng(3).permutation(self.pool.layout.pages))
        self.nodes: list[torch.Tensor] = []
        self.locked: set[int] = set()
        self.read = 0
        read = self.evictable._read

        def counting(slots: list[torch.Tensor]) -> None:
            self.read += len(slots)
            read(slots)

        self.evictable._read = counting  # type: ignore[method-assign, assignment]

    @rule(pages=st.integers(1, 40))
    def insert(self, pages: int) -> None:
        taken, self.free = self.free[:pages], self.free[pages:]
        if taken:
            slots = np.array(taken)[:, None] * PAGE + np.arange(PAGE)
            self.nodes.append(torch.from_numpy(slots.reshape(-1).astype(np.int64)))

    @precondition(lambda self: self.nodes)
    @rule(which=WHICH)
    def lock_or_unlock(self, which: int) -> None:
        self.locked ^= {id(self.nodes[which % len(self.nodes)])}

    @precondition(lambda self: self.nodes)
    @rule(which=WHICH, at=WHICH)
    def split(self, which: int, at: int) -> None:
        """Above stays what was locked, as views of one tensor."""
        node = self.nodes.pop(which % len(self.nodes))
        pages = len(node) // PAGE
        if pages > 1:
            cut = (1 + at % (pages - 1)) * PAGE
            parts = [node[:cut], node[cut:]]
        else:
            parts = [node.clone()]
        if id(node) in self.locked:
            self.locked = self.locked - {id(node)} | {id(part) for part in parts}
        self.nodes += parts

    @precondition(lambda self: self.nodes)
    @rule(which=WHICH)
    def evict(self, which: int) -> None:
        node = self.nodes.pop(which % len(self.nodes))
        self.locked.discard(id(node))
        self.free += (node[::PAGE] // PAGE).tolist()

    @rule()
    def flush(self) -> None:
        while self.nodes:
            self.evict(0)

    def unlocked(self) -> list[torch.Tensor]:
        return [node for node in self.nodes if id(node) not in self.locked]

    @rule()
    def ask(self) -> None:
        tokens = self.unlocked()
        pages = torch.unique(torch.cat(tokens) // PAGE).numpy() if tokens else np.empty(0, dtype=np.int64)
        assert self.evictable.follow(tokens) == list(self.pool.count_by_column(pages))
        self.read = 0
        self.evictable.follow(self.unlocked())
        assert self.read == 0, "nothing changed, so nothing is read"

    @rule()
    def lock_and_unlock(self) -> None:
        """What was read once is not read again when it is locked for a while."""
        tokens = self.unlocked()
        self.evictable.follow(tokens)
        self.evictable.follow(tokens[1:])
        self.read = 0
        self.evictable.follow(tokens)
        assert self.read == 0


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40)
