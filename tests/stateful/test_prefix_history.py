"""Random requests into a small history: bounds hold, and what it says was seen was really seen.

A twin is told the same, but for ends that are entered anew there and lengthened here: nothing may tell them apart.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.history import History, HistoryMatch
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class HistoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.histories = [
            History(ReuseTable(PRIORS), max_tokens=120, max_marks=10, min_branch_tokens=2) for _ in range(2)
        ]
        self.running: list[tuple[list[int], list[HistoryMatch]]] = []
        self.past: list[tuple[int, ...]] = []
        self.now = 0.0

    def sightings(self, tokens: list[int], n_input: int, boundaries: tuple[int, ...] = ()) -> list[HistoryMatch]:
        both = [history.observe(as_tokens(tokens), n_input, self.now, boundaries) for history in self.histories]
        assert told(both[0]) == told(both[1])
        return both

    @rule(tokens=SEQUENCES, data=st.data(), gap=st.floats(0.0, 500.0))
    def observe(self, tokens: list[int], data: st.DataObject, gap: float) -> None:
        n_input = data.draw(st.integers(0, len(tokens)))
        at = data.draw(st.lists(st.integers(1, n_input), max_size=2)) if n_input else []
        self.now += gap
        sighting, _ = self.sightings(tokens, n_input, tuple(at))
        shared = max((common(past, tokens[:n_input]) for past in self.past), default=0)
        assert sighting.seen_tokens <= shared
        assert all(0 < position < n_input for position, _ in sighting.marks)
        assert [position for position, _ in sighting.marks] == sorted({position for position, _ in sighting.marks})
        self.past.append(tuple(tokens))

    @rule(tokens=SEQUENCES)
    def ask(self, tokens: list[int]) -> None:
        """A request whose answer comes later."""
        self.running.append((tokens, self.sightings(tokens, len(tokens))))
        self.past.append(tuple(tokens))

    @rule(answer=SEQUENCES, data=st.data(), gap=st.floats(0.0, 5.0))
    def answer(self, answer: list[int], data: st.DataObject, gap: float) -> None:
        if not self.running:
            return
        tokens, both = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.now += gap
        whole = as_tokens(tokens + answer)
        ours, twin = self.histories
        marks = [lengthened(ours, both[0], whole, len(tokens), self.now), twin.extend(whole, both[1].tip, self.now)]
        assert (marks[0] is both[0].tip) == (marks[1] is both[1].tip)
        assert seen_of(marks[0]) == seen_of(marks[1])
        self.past.append(tuple(tokens + answer))

    @rule(tokens=SEQUENCES, data=st.data())
    def give_up(self, tokens: list[int], data: st.DataObject) -> None:
        """A request that computed the first `keep` tokens of its prompt, and those that others had."""
        both = self.sightings(tokens, len(tokens))
        keep = data.draw(st.integers(1, len(tokens)))
        for history, sighting in zip(self.histories, both, strict=True):
            history.extend(as_tokens(tokens[:keep]), sighting.tip, self.now)
            history.shorten(as_tokens(tokens), max(keep, sighting.seen_tokens))
        self.past.append(tuple(tokens[: max(keep, both[0].seen_tokens)]))

    @rule(tokens=SEQUENCES)
    def seed(self, tokens: list[int]) -> None:
        for history in self.histories:
            history.seed(as_tokens(tokens), self.now)
        self.past.append(tuple(tokens))

    @invariant()
    def consistent(self) -> None:
        ours, twin = self.histories
        for history in self.histories:
            history.check()
        assert (ours.tree.kv_tokens, ours.tree.states) == (twin.tree.kv_tokens, twin.tree.states)
        assert (ours.table.events, ours.table.passed) == (twin.table.events, twin.table.passed)


def lengthened(history: History, sighting: HistoryMatch, whole: Tokens, n_input: int, now: float) -> Mark:
    """The end of `whole`, by the short way where it is open."""
    leaf = sighting.leaf
    if leaf is not None and leaf.end == n_input and history.lengthen(leaf, whole[n_input:], sighting.tip, now):
        return sighting.tip
    return history.extend(whole, sighting.tip, now)


def seen_of(mark: Mark) -> tuple[object, ...]:
    return mark.kind, mark.hits, mark.last_s, mark.depth, mark.reuse_class, mark.announced, mark.unkept


def told(sighting: HistoryMatch) -> tuple[object, ...]:
    branch = None if sighting.branch is None else seen_of(sighting.branch)
    marks = [(position, seen_of(mark)) for position, mark in sighting.marks]
    return sighting.seen_tokens, marks, branch, seen_of(sighting.tip), sighting.kept_tokens


def common(a: tuple[int, ...], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestHistory = HistoryMachine.TestCase
TestHistory.settings = settings(max_examples=40, stateful_step_count=30)
