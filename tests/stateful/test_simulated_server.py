"""Random requests side by side in a simulated server: its account after every step, and at the end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.memory.sizing import KV, STATE, Kinds, Sizing
from sglang_hybrid.prefix.policies import POLICIES, served
from sglang_hybrid.prefix.tree.check import walk
from sglang_hybrid.prefix.tree.tokens import as_tokens
from sglang_hybrid.sim.elastic import ElasticServer
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

MODEL = ModelSpec("hybrid", 2, 30, 1.0, 0.001)
SHAPES = {
    "extra_buffer": Shape(12, 400, grid=8, chunk_tokens=24, track_tokens=16),
    "no_buffer": Shape(12, 400, grid=1, chunk_tokens=24, buffers=0),
    "steps": Shape(12, 400, grid=8, step=8, buffers=2),
    "pages": Shape(12, 400, grid=8, chunk_tokens=24, track_tokens=16, page=8),
}
SIZINGS = {  # the same with one budget: columns of two states or one, and of 32 tokens
    "elastic": (Shape(12, 400, grid=8, chunk_tokens=24, track_tokens=16, page=8), Kinds(2, 2, 8, 30), 64),
    "elastic_no_buffer": (Shape(12, 400, grid=1, chunk_tokens=24, buffers=0), Kinds(2, 2, 1, 60), 64),
}
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def server(memory: str, policy: str) -> tuple[SimulatedServer, Shape]:
    """A server with one of SHAPES or SIZINGS, and its shape."""
    if memory in SHAPES:
        return SimulatedServer(MODEL, SHAPES[memory], policy), SHAPES[memory]
    shape, kinds, granule_bytes = SIZINGS[memory]
    return ElasticServer(MODEL, shape, Sizing(kinds, granule_bytes, 64 * 48, 2), policy), shape


class ServerMachine(RuleBasedStateMachine):
    policy = "forecast"
    memory = "extra_buffer"

    def __init__(self) -> None:
        super().__init__()
        self.server, self.shape = server(self.memory, self.policy)
        self.running: dict[str, list[int]] = {}
        self.past: list[tuple[str | None, list[int]]] = []
        self.now = 0.0

    @precondition(lambda self: len(self.running) < 2)
    @rule(prompt=PROMPTS, data=st.data(), gap=st.floats(0.0, 100.0))
    def arrive(self, prompt: list[int], data: st.DataObject, gap: float) -> None:
        self.now += gap
        if self.past and data.draw(st.booleans()):
            prompt = (data.draw(st.sampled_from(self.past))[1] + prompt)[:120]
        namespace = data.draw(st.sampled_from((None, "tenant")))
        name = str(self.now) + str(len(self.past))
        hit = self.server.arrive(name, as_tokens(prompt), self.now, namespace)
        seen = [past[:hit] for other, past in self.past if other == namespace]
        assert hit == 0 or (hit < len(prompt) and prompt[:hit] in seen)
        assert hit % self.shape.page == 0
        self.running[name] = prompt
        self.past.append((namespace, prompt))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), answer=st.lists(st.integers(0, 2), max_size=30))
    def finish(self, data: st.DataObject, answer: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        whole = self.running.pop(name) + answer
        self.server.decode(name, len(answer), self.now)
        self.server.finish(name, as_tokens(whole), self.now)
        self.past.append((self.past[-1][0], whole))
        self.past.append((None, whole))
        self.past.append(("tenant", whole))

    @invariant()
    def consistent(self) -> None:
        server = self.server
        server.check()
        assert server.free_states >= 0
        assert server.free_tokens >= 0
        assert server.free_tokens % self.shape.page == 0
        marks = [node.state for node in walk(server.tree) if node.state is not None]
        assert len({id(mark) for mark in marks}) == len(marks), "the use of one state would leave another's price"

    def teardown(self) -> None:
        for name, prompt in self.running.items():
            self.server.finish(name, as_tokens(prompt), self.now)
        server = self.server
        server.check()
        if isinstance(server, ElasticServer):
            while server.claims.evict_one((KV, STATE)):
                pass
            holdings = server.claims.holdings
            holdings.release_held()
            holdings.sort(wait=True)
            pinned = server.sizing.kv_column_granules + server.sizing.state_column_granules
            assert (server.tree.states, server.tree.kv_tokens, holdings.budget.used) == (0, 0, pinned)
        else:
            assert server.free_states + server.tree.states == self.shape.states, "what ran has given back its slots"
            assert server.free_tokens + server.tree.kv_tokens == self.shape.kv_tokens


@pytest.mark.parametrize("memory", [*SHAPES, *SIZINGS])
@pytest.mark.parametrize("policy", [*served(), "vllm+"])
def test_random_requests(policy: str, memory: str) -> None:
    assert policy in POLICIES
    machine = type("Machine", (ServerMachine,), {"policy": policy, "memory": memory})
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None))
