"""Requests with segments in common, in one cache of hardly any memory: what is copied is what was computed, always.

A model of the memory holds the tokens of every slot and the entry of every block, written as a pass would write them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sglang_hybrid.segment.geometry import Range, Seams
from sglang_hybrid.segment.index import Entry
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt
from tests.unit.segment.played import BLOCK_TOKENS, BLOCK_TRANSITIONS, Memory, Played, a_prompt, an_index

ALL = 1 << 40
DOCUMENTS = [
    [1000 * (n + 1) + at for at in range(length)] for n, length in enumerate((64, 64, 70, 99, 130, 64 + 16, 30))
]
NAMES = st.integers(0, len(DOCUMENTS) - 1)


@dataclass(eq=False)
class Asked:
    """A request: its segments, what was run of it, the namespace."""

    prompt: SegmentedPrompt
    played: Played
    starts: int = 0
    pinned: set[int] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return self.played.end == len(self.prompt.ids)


class SegmentMachine(RuleBasedStateMachine):
    blocks = 8
    pooled = False
    transitions = 0
    width, window, page, most = 8, 3, 1, 1000

    def __init__(self) -> None:
        super().__init__()
        self.index = an_index(self.blocks, history_marks=20, pooled=self.pooled, transitions=self.transitions)
        self.seams = Seams(self.width, self.window)
        self.memory = Memory.of(self.index)
        self.requests: list[Asked] = []
        self.batch: list[Asked] = []
        self.now = 0.0
        self.unsettled: list[Entry] = []

    @precondition(lambda self: len(self.requests) < 4)
    @rule(
        parts=st.lists(st.tuples(st.sampled_from((0, 0, 1, 9, 40)), NAMES), min_size=1, max_size=4),
        question=st.sampled_from((0, 1, 30)),
        namespace=st.sampled_from((None, None, "tenant")),
        cached=st.floats(0.0, 1.0),
    )
    def arrive(self, parts: list[tuple[int, int]], question: int, namespace: str | None, cached: float) -> None:
        """A prompt of documents with text between them; a part of it may be cached as plain text."""
        ids, ranges = list[int](), list[Range]()
        for text, name in parts:
            ids += range(text)
            ranges.append((len(ids), len(ids) + len(DOCUMENTS[name])))
            ids += DOCUMENTS[name]
        ids += range(500, 500 + question)
        prompt = a_prompt(ids, ranges, self.seams, namespace)
        start = int(cached * (len(ids) - 1)) // self.page * self.page if cached > 0.5 else 0
        prompt.compose(range(prompt.first_behind(start)))
        request = Asked(prompt, Played(prompt.ids, self.memory), start)
        request.played.resume(start)
        self.requests.append(request)

    @precondition(lambda self: any(not each.done for each in self.requests))
    @rule(data=st.data(), gap=st.sampled_from((0.0, 0.1, 30.0)), share=st.floats(0.0, 1.0), follow=st.booleans())
    def begin(self, data: st.DataObject, gap: float, share: float, follow: bool) -> None:
        """A scheduler decides on the next pass of a request, which may join the batch."""
        self.now += gap
        waiting = [each for each in self.requests if not each.done and each not in self.batch]
        if not waiting:
            return
        request = data.draw(st.sampled_from(waiting))
        total, start = len(request.prompt.ids), request.played.end
        if data.draw(st.integers(0, 3)) == 0:  # there is memory for so much KV
            total = max(start + 1, int(start + (total - start) * share) // self.page * self.page)
        tokens = self.most if not self.batch else int(share * self.most)
        made = request.prompt.begin(start, total, Limits(tokens, self.most, self.page), self.index, self.now)
        if made is None:
            assert tokens < self.most or total < len(request.prompt.ids), "an empty pass gets on"
            return
        assert (made.start, made.end > start, made.end <= total) == (start, True, True)
        assert made.run_tokens <= tokens
        if follow and made.end > start + 1:  # SGLang chose a shorter pass
            end = made.end - data.draw(st.integers(0, made.end - start - 1))
            made = request.prompt.begin(start, end, Limits(ALL, ALL), self.index, self.now)
            if made is None:  # all of it lies in an interior
                return
            assert made.end == end
            assert made.run_tokens <= tokens
        self.batch.append(request)

    @precondition(lambda self: self.batch)
    @rule()
    def revoke(self) -> None:
        """The request that came last into the batch is not run after all."""
        self.batch.pop().prompt.revoke(self.index)

    @precondition(lambda self: self.batch)
    @rule()
    def run(self) -> None:
        """The batch runs: all is made before anything is copied."""
        passes = [request.prompt.commit(self.index) for request in self.batch]
        for request, made in zip(self.batch, passes, strict=True):
            self.memory.make(made, request.prompt.ids)
            self.unsettled += [cold.entry for cold in made.cold]
        for request, made in zip(self.batch, passes, strict=True):
            request.played.run(made)
            if request.done:
                request.played.ended(request.prompt, request.starts)
        self.batch.clear()

    @precondition(lambda self: any(each not in self.batch for each in self.requests))
    @rule(data=st.data(), again=st.booleans())
    def end(self, data: st.DataObject, again: bool) -> None:
        """A request is done, aborted in its middle, or retracted to begin again with nothing cached."""
        request = data.draw(st.sampled_from([each for each in self.requests if each not in self.batch]))
        if again:
            request.prompt.restart(self.index)
            request.played, request.starts = Played(request.prompt.ids, self.memory), 0
        else:
            request.prompt.end(self.index)
            self.requests.remove(request)

    @precondition(lambda self: self.unsettled)
    @rule(share=st.floats(0.0, 1.0))
    def settle(self, share: float) -> None:
        """It is known which transitions vanished, maybe of an entry that is gone."""
        entry = self.unsettled.pop(0)
        kept = int(share * self.transitions)
        self.index.settle(entry, kept)
        assert entry.transitions.size in (kept, 0)

    @precondition(lambda self: len(self.index))
    @rule(data=st.data(), everything=st.booleans())
    def drop(self, data: st.DataObject, everything: bool) -> None:
        if everything:
            self.index.clear()
            assert not len(self.index)
        else:
            self.index.drop(data.draw(st.sampled_from(list(self.index))))

    @invariant()
    def one_story(self) -> None:
        index = self.index
        index.check()
        pins: dict[int, int] = {}
        held = {id(entry): entry for entry in index}
        for request in self.requests:
            for segment in request.prompt.segments:
                if segment.entry is not None:
                    pins[id(segment.entry)] = pins.get(id(segment.entry), 0) + 1
                    held[id(segment.entry)] = segment.entry
        making = {id(cold.entry) for each in self.batch if each.prompt.open for cold in each.prompt.open.cold}
        states, slots = [entry.block for entry in held.values()], [s for e in held.values() for s in e.slots.tolist()]
        assert all(entry.pins == pins.get(number, 0) for number, entry in held.items()), "a pin is somebody's"
        assert all(entry.making == (number in making) for number, entry in held.items() if not entry.void)
        assert len({*states}) == len(states)
        assert len({*slots}) == len(slots)
        of_transitions = [slot for entry in held.values() for slot in entry.transitions.tolist()]
        assert len({*of_transitions}) == len(of_transitions)
        kinds = [{*states}, {slot // BLOCK_TOKENS for slot in slots}, {t // BLOCK_TRANSITIONS for t in of_transitions}]
        assert len(set.union(*kinds)) == sum(map(len, kinds)), "a block holds one kind"
        assert index.blocks.free == self.blocks - sum(map(len, kinds)), "the rest is free"
        assert index.counts.made + len(making) >= len(index)

    def teardown(self) -> None:
        while self.batch:
            self.batch.pop().prompt.revoke(self.index)
        for request in self.requests:
            request.prompt.end(self.index)
        assert len(self.index._order) == len(self.index), "nobody relies on anything"
        self.index.clear()
        self.index.check()
        blocks = self.index.blocks
        assert (blocks.free, blocks.kv.free, blocks.transitions.free) == (self.blocks, 0, 0)


CASES = {
    "server": {},
    "pages": {"page": 64, "most": 256},
    "small pages and passes": {"page": 16, "most": 120},
    "hardly any memory": {"blocks": 4},
    "transitions": {"transitions": 6, "blocks": 10},
    "hardly any memory for transitions": {"transitions": 3, "blocks": 4},
    "transitions in a pool": {"transitions": 6, "blocks": 10, "pooled": True},
    "a pool": {"pooled": True},
    "no seams": {"width": 0, "window": 0},
    "wide seams": {"width": 16, "window": 0, "page": 16, "most": 200},
    "a window wider than the seams": {"width": 0, "window": 3},
    "large pages": {"page": 128, "most": 128, "width": 3, "window": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_random_requests(case: str) -> None:
    machine = type("Machine", (SegmentMachine,), CASES[case])
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=40, deadline=None))
