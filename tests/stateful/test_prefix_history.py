"""Random requests into a small history: bounds hold, and what it says was seen was really seen."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hybrid.prefix.classes import PRIORS
from sglang_hybrid.prefix.history import History
from sglang_hybrid.prefix.reuse import ReuseTable
from sglang_hybrid.prefix.tokens import as_tokens

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class HistoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.history = History(ReuseTable(PRIORS), max_tokens=120, max_marks=10, min_branch_tokens=2)
        self.past: list[tuple[int, ...]] = []
        self.now = 0.0

    @rule(tokens=SEQUENCES, data=st.data(), gap=st.floats(0.0, 500.0))
    def observe(self, tokens: list[int], data: st.DataObject, gap: float) -> None:
        n_input = data.draw(st.integers(0, len(tokens)))
        at = data.draw(st.lists(st.integers(1, n_input), max_size=2)) if n_input else []
        self.now += gap
        sighting = self.history.observe(as_tokens(tokens), n_input, self.now, tuple(at))
        shared = max((common(past, tokens[:n_input]) for past in self.past), default=0)
        assert sighting.seen_tokens <= shared
        assert all(0 < position < n_input for position, _ in sighting.marks)
        assert [position for position, _ in sighting.marks] == sorted({position for position, _ in sighting.marks})
        self.past.append(tuple(tokens))

    @rule(tokens=SEQUENCES, data=st.data())
    def give_up(self, tokens: list[int], data: st.DataObject) -> None:
        """A request that computed the first `keep` tokens of its prompt, and those that others had."""
        sighting = self.history.observe(as_tokens(tokens), len(tokens), self.now)
        keep = data.draw(st.integers(1, len(tokens)))
        self.history.extend(as_tokens(tokens[:keep]), sighting.tip, self.now)
        self.history.shorten(as_tokens(tokens), max(keep, sighting.seen_tokens))
        self.past.append(tuple(tokens[: max(keep, sighting.seen_tokens)]))

    @rule(tokens=SEQUENCES)
    def seed(self, tokens: list[int]) -> None:
        self.history.seed(as_tokens(tokens), self.now)
        self.past.append(tuple(tokens))

    @invariant()
    def consistent(self) -> None:
        self.history.check()


def common(a: tuple[int, ...], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestHistory = HistoryMachine.TestCase
TestHistory.settings = settings(max_examples=40, stateful_step_count=30)
