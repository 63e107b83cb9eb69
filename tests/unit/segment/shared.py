"""A budget for KV, states and segments in numbers alone, with a cache whose every node has a worth that is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sglang_hybrid.memory.backing import LedgerBacking
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.claims import Claims
from sglang_hybrid.memory.holdings import Holdings
from sglang_hybrid.memory.layout import first_planes
from sglang_hybrid.memory.meter import Meter
from sglang_hybrid.memory.sizing import KV, SEGMENT, STATE, Kinds, Sizing, segment_layout
from sglang_hybrid.memory.supply import AtHand, PageSupply
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.index import Costs, Entry, SegmentIndex
from sglang_hybrid.segment.slabs import Cut, Numbering
from sglang_hybrid.segment.source import PooledBlocks
from tests.unit.segment.played import MODEL

GRANULE, TOKENS = 64, 8
"""Bytes of a granule, and slots of a block."""


@dataclass(eq=False)
class Node:
    """What a prefix cache holds: pages of one kind, and what a byte of them is worth."""

    kind: str
    pages: np.ndarray
    worth: float
    read: bool = False


class Shared(Claims):
    """The budget of `granules`; blocks of segments take `block_bytes`. Its nodes are the rivals of its segments, of
    which each has so many `transitions`."""

    def __init__(
        self, granules: int = 40, block_bytes: int = 32, history_marks: int = 50, limit: int = 0, transitions: int = 0
    ) -> None:
        sizing = Sizing(Kinds(16, 2, 1, GRANULE), GRANULE, granules * GRANULE, 1)
        segments = segment_layout(block_bytes, GRANULE, limit or granules * GRANULE)
        layouts = (sizing.kv_layout, sizing.state_layout, segments)
        backing = LedgerBacking([size for layout in layouts for size in layout.plane_granules])
        holdings = Holdings(sizing, Budget(sizing.total_bytes, GRANULE, backing), lambda: 0.0)
        for layout, first_plane in zip(layouts, first_planes(layouts), strict=True):
            pool = holdings.budget.add_pool(layout, first_plane)
            holdings.supplies[layout.name] = PageSupply(holdings.budget, pool, holdings.tidy, Meter(lambda: 0.0))
        super().__init__(holdings)
        source = PooledBlocks(holdings.supplies[SEGMENT])
        numbering = Numbering(3 * TOKENS + 2, 3)
        blocks = Blocks(segments.pages, Cut(TOKENS, numbering, TOKENS // 2), source, Cut(4, Numbering(9, 2), 2))
        costs = Costs(
            MODEL, block_bytes, block_bytes // TOKENS, transitions=transitions, transition_bytes=block_bytes // 4
        )
        self.index = SegmentIndex(blocks, costs, history_marks=history_marks, rivals=self)
        self.nodes: list[Node] = []
        self.now = 0.0
        self.left: list[float] = []
        """What a byte was worth of everything that was evicted."""

    def put(self, kind: str, pages: int, worth: float) -> Node | None:
        """Cache `pages` of a kind, evicting for them what is worth least; None if that cannot be."""
        if not self.secure({kind: pages}):
            return None
        taken = self.holdings.supplies[kind].hand_out(pages)
        assert taken is not None
        self.nodes.append(Node(kind, taken, worth))
        return self.nodes[-1]

    def worth(self, entry: Entry) -> float:
        return self.index._worth(entry, self.now)

    def stays(self) -> list[float]:
        """What a byte is worth of everything that could be evicted."""
        return [self.worth(each) for each in self.index if not each.pins] + [
            node.worth for node in self.nodes if not node.read
        ]

    def _lowest(self, kinds: tuple[str, ...]) -> Node | None:
        nodes = [node for node in self.nodes if not node.read and node.kind in kinds]
        return min(nodes, key=lambda node: node.worth, default=None)

    def least(self, now: float) -> float | None:
        node = self._lowest((KV, STATE))
        return None if node is None else node.worth

    def evict(self) -> bool:
        return self._drop(self._lowest((KV, STATE))) > 0

    def _drop(self, node: Node | None) -> int:
        if node is None:
            return 0
        self.nodes.remove(node)
        self.left.append(node.worth)
        self.holdings.supplies[node.kind].take_back(AtHand(node.pages), len(node.pages))
        return len(node.pages) * self._page_bytes(node.kind)

    def _page_bytes(self, kind: str) -> int:
        sizing = self.holdings.sizing
        return sizing.kinds.token_bytes if kind == KV else sizing.state_slot_bytes

    def evict_one(self, kinds: tuple[str, ...]) -> int:
        node = self._lowest(kinds)
        before = {each.number: self.worth(each) for each in self.index}
        if SEGMENT in kinds and (freed := self.index.give_way(math.inf if node is None else node.worth, self.now)):
            self.left += [worth for number, worth in before.items() if number not in {e.number for e in self.index}]
            return freed
        return self._drop(node)

    def evictable(self) -> dict[str, list[tuple[int, int]]]:
        found = {}
        for kind in (KV, STATE):
            pages = [node.pages for node in self.nodes if node.kind == kind and not node.read]
            found[kind] = self._by_column(kind, np.concatenate([np.empty(0, np.int64), *pages]))
        found[SEGMENT] = self._by_column(SEGMENT, np.array(self.index.unpinned_blocks(), np.int64))
        return found

    def _by_column(self, kind: str, pages: np.ndarray) -> list[tuple[int, int]]:
        return list(self.holdings.supplies[kind].pool.count_by_column(pages))

    def evictable_states(self) -> int:
        return sum(len(node.pages) for node in self.nodes if node.kind == STATE and not node.read)

    def evictable_blocks(self) -> int:
        return len(self.index.unpinned_blocks())

    def held(self) -> tuple[int, int]:
        return tuple(sum(len(n.pages) for n in self.nodes if n.kind == kind) for kind in (KV, STATE))  # type: ignore

    def leave(self, share: float) -> None:
        raise AssertionError(f"nothing was said to leave the cache: {share}")

    def check(self) -> None:
        """The account adds up, and everybody's pages are his own."""
        self.holdings.sort()
        self.holdings.budget.check()
        self.index.check()
        pages: Mapping[str, list[int]] = {KV: [0], STATE: [0], SEGMENT: [0, *self.index.blocks.taken]}
        for node in self.nodes:
            pages[node.kind].extend(node.pages.tolist())
        for kind, its in pages.items():
            supply = self.holdings.supplies[kind]
            assert len({*its}) == len(its) == supply.pool.live_pages - len(supply.held)
        budget = self.holdings.budget
        assert budget.used + budget.free + budget.unmapped == budget.total
