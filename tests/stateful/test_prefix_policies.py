"""Random requests through every policy and model kind: budget, honesty and every index after each step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.prefix.tree.tokens import as_tokens
from sglang_hybrid.sim.cache import open_cache

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=40)
MODELS = {
    "hybrid": ModelSpec("hybrid", 2, 30, 1.0, 0.001),
    "transformer": ModelSpec("transformer", 2, 0, 1.0, 0.001),
    "ssm": ModelSpec("ssm", 0, 30, 1.0, 0.0),
}
CAPACITY_BYTES = 200


class CacheMachine(RuleBasedStateMachine):
    policy = "lru"
    model = MODELS["hybrid"]

    def __init__(self) -> None:
        super().__init__()
        self.cache = open_cache(self.policy, CAPACITY_BYTES, self.model)
        self.past: list[list[int]] = []
        self.now = 0.0

    @rule(tokens=SEQUENCES, data=st.data(), gap=st.floats(-5.0, 100.0))
    def request(self, tokens: list[int], data: st.DataObject, gap: float) -> None:
        self._serve(tokens, data, gap)

    @precondition(lambda self: self.past)
    @rule(more=SEQUENCES, data=st.data(), gap=st.floats(0.0, 10.0))
    def continued(self, more: list[int], data: st.DataObject, gap: float) -> None:
        self._serve(data.draw(st.sampled_from(self.past))[:60] + more, data, gap)

    def _serve(self, tokens: list[int], data: st.DataObject, gap: float) -> None:
        n_input = data.draw(st.integers(0, len(tokens)))
        boundaries = data.draw(st.lists(st.integers(1, n_input), max_size=1)) if n_input else []
        self.now += gap
        hit = self.cache.lookup(as_tokens(tokens[:n_input]), self.now)
        computed = [past[:hit] for past in self.past]
        assert hit == 0 or (hit < n_input and tokens[:hit] in computed)
        self.cache.commit(as_tokens(tokens), n_input, self.now, tuple(boundaries))
        self.past.append(tokens)

    @rule(tokens=SEQUENCES)
    def seed(self, tokens: list[int]) -> None:
        self.cache.seed(as_tokens(tokens), self.now)

    @invariant()
    def consistent(self) -> None:
        self.cache.check()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_random_requests(policy: str, model: str) -> None:
    machine = type("Machine", (CacheMachine,), {"policy": policy, "model": MODELS[model]})
    few = settings(max_examples=15, stateful_step_count=25)
    run_state_machine_as_test(machine, settings=few)
