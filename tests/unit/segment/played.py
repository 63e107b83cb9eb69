"""Passes of composed prompts, played token by token: what their states have seen, and what their KV holds.

The reference that `begin` and `assemble` are held against. A state is the list of what went into it: a position for a
token that was run, an entry for an interior that was jumped over. KV is a dictionary by position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.memory.backing import LedgerBacking
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.layout import Layout, Planes
from sglang_hybrid.memory.meter import Meter
from sglang_hybrid.memory.supply import PageSupply
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.geometry import Range, Seams
from sglang_hybrid.segment.index import Costs, Entry, SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.passes import Pass
from sglang_hybrid.segment.prompt import SegmentedPrompt
from sglang_hybrid.segment.slabs import Cut
from sglang_hybrid.segment.source import PooledBlocks

MODEL = ModelSpec("hybrid", 2, 30, 1.0, 0.001)
BLOCK_TOKENS, BLOCK_TRANSITIONS = 50, 4


def an_index(blocks: int = 1000, history_marks: int = 1000, pooled: bool = False, transitions: int = 0) -> SegmentIndex:
    """An index over `blocks` blocks of BLOCK_TOKENS slots, which may be the pages of a pool.

    An entry has `transitions`, of which a block holds BLOCK_TRANSITIONS.
    """
    costs = Costs(MODEL, 2 * BLOCK_TOKENS, 2, transitions=transitions, transition_bytes=25)
    source = PooledBlocks(a_supply(blocks)) if pooled else None
    held = Blocks(blocks, Cut(BLOCK_TOKENS), source, Cut(BLOCK_TRANSITIONS))
    return SegmentIndex(held, costs, history_marks=history_marks)


def a_supply(pages: int) -> PageSupply:
    """The supply of a pool that has a budget of `pages` pages to itself, two to a column."""
    layout = Layout("segment", (Planes("segment", 1, 50),), pages, 100)
    budget = Budget(pages * 50, 100, LedgerBacking(layout.plane_granules))
    pool = budget.add_pool(layout)
    return PageSupply(budget, pool, lambda wait=False: pool.sort(), Meter(lambda: 0.0))


def a_prompt(
    ids: Sequence[int], ranges: Sequence[Range], seams: Seams, namespace: str | None = None
) -> SegmentedPrompt:
    """The segments `ranges` of the prompt `ids`."""
    return SegmentedPrompt(array("q", ids), tuple(ranges), seams, Identity("model", seams.head, seams.tail), namespace)


@dataclass
class Memory:
    """What the blocks and slots of an index hold: the token that was written there, and the entry whose states or
    transition."""

    slots: np.ndarray
    blocks: list[Entry | None]
    transitions: dict[int, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, index: SegmentIndex) -> Memory:
        count = index.blocks.count
        return cls(np.full(count * index.blocks.kv.cut.slots, -1, np.int64), [None] * count)

    def make(self, made: Pass, ids: Sequence[int]) -> None:
        """Run what `made` makes."""
        for cold in made.cold:
            low, high = cold.interior
            self.slots[cold.entry.slots] = ids[low:high]
            self.blocks[cold.entry.block] = cold.entry
            self.transitions.update(dict.fromkeys(cold.entry.transitions.tolist(), cold.entry))


@dataclass
class Played:
    """One request: `state` and `kv` as they are after the passes so far."""

    ids: Sequence[int]
    memory: Memory
    state: list[int | Entry] = field(default_factory=list)
    kv: dict[int, tuple[str, int]] = field(default_factory=dict)
    end: int = 0
    saved: list[tuple[int, list[int | Entry]]] = field(default_factory=list)

    def resume(self, at: int, state: Sequence[int | Entry] = ()) -> Played:
        """Begin behind `at` tokens that are cached, with what their state has seen; all of them if nothing is said."""
        self.end, self.state = at, list(state) or list(range(at))
        self.kv = {position: ("cached", self.ids[position]) for position in range(at)}
        return self

    def run(self, made: Pass) -> None:
        """Copy and run what `made` says, after everything of its batch was made."""
        assert made.start == self.end
        for copy in made.copies:
            assert copy.tokens > 0
            held = self.memory.slots[copy.entry.slots[copy.first : copy.first + copy.tokens]]
            for place, token in zip(range(copy.at, copy.at + copy.tokens), held.tolist(), strict=True):
                assert place not in self.kv, "a position is written once"
                self.kv[place] = "copied", token
        at = made.start
        for row in made.rows:
            assert row.start >= at, "rows come in order"
            if row.jump is not None:
                assert self.memory.blocks[row.jump.block] is row.jump, "its states are there"
                slots = row.jump.transitions.tolist()
                assert all(self.memory.transitions[slot] is row.jump for slot in slots), "its transitions are there"
                self.state.append(row.jump)
            for place in range(row.start, row.end):
                assert place not in self.kv, "a position is written once"
                assert all(before in self.kv for before in range(at, place)), "what precedes it can be looked at"
                self.kv[place] = "run", self.ids[place]
                self.state.append(place)
            at = row.end
        self.end = made.end
        assert sorted(self.kv) == list(range(self.end)), "every position is run, copied or cached"

    def ended(self, prompt: SegmentedPrompt, start: int, plain: Sequence[Range] = ()) -> None:
        """Raise AssertionError unless all of the prompt was seen as it had to be, its tokens with their KV.

        It began at `start`; `plain` are segments that have to be computed as plain text.
        """
        assert [token for _, token in self.kv.values()] == [self.ids[place] for place in self.kv]
        expected: list[int | str] = []
        copied = set()
        at = 0
        for segment in prompt.segments:
            low, high = segment.interior
            if segment.composed and low >= start:
                assert segment.range not in plain
                expected += [*range(at, low), segment.key.hex()]
                copied |= set(range(low, high))
                at = high
        expected += range(at, self.end)
        assert [each if isinstance(each, int) else each.key.hex() for each in self.state] == expected
        assert {place for place, (how, _) in self.kv.items() if how == "copied"} == copied
