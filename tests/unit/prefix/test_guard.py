"""Whatever the order of eviction, and whatever comes, LRU is ahead by no more than `guard` says."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.guard.guard import DEBT, SAVINGS, Guard
from sglang_hybrid.prefix.guard.shadow import ShadowLru
from sglang_hybrid.prefix.log_schema import SLOTS_PER_PASS
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.prefix.replay import replay
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog
from sglang_hybrid.prefix.tree.check import walk
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.sim.prefix_cache import PrefixCache
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

MODEL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
SMALL = ModelSpec("small", kv_bytes_per_token=8, checkpoint_bytes=1000, flops_per_token=1e6, flops_per_token_pair=10)


GRID = 64
SHAPE = Shape(24 + SLOTS_PER_PASS, 40_000, GRID)


def text(rng: np.random.Generator, tokens: int) -> Tokens:
    return rng.integers(0, 32_000, tokens).astype(np.int32)


class Worst:
    """An order for the worst: what was used last leaves first."""

    def __init__(self) -> None:
        self._touches: dict[int, int] = {}

    def put(self, candidate: Candidate) -> None:
        self._touches[candidate.id] = candidate.touch

    def discard(self, candidate_id: int) -> None:
        self._touches.pop(candidate_id, None)

    def pop(self, now: float) -> int | None:
        if not self._touches:
            return None
        victim = max(self._touches, key=self._touches.__getitem__)
        del self._touches[victim]
        return victim

    def __len__(self) -> int:
        return len(self._touches)

    def check(self) -> None:
        """There is nothing to contradict."""


class Whim(Worst):
    """An order that is another one for every victim."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(5)

    def pop(self, now: float) -> int | None:
        if not self._touches:
            return None
        victim = int(self._rng.choice(list(self._touches)))
        del self._touches[victim]
        return victim


def one_budget(order: type[Worst], states: int, guarded: bool = True) -> PrefixCache:
    """Room for `states` states and 100 tokens of KV with each."""
    return PrefixCache(SMALL, states * 1800, POLICIES["forecast"]._replace(eviction=lambda _: order(), guarded=guarded))


def two_pools(order: type[Worst], states: int, guarded: bool = True) -> SimulatedServer:
    """The same in two pools, on a grid."""
    policy = POLICIES["forecast"]._replace(eviction=lambda _: order(), guarded=guarded)
    return SimulatedServer(SMALL, Shape(SLOTS_PER_PASS + states, states * 200 + 600, GRID), policy)


class Account:
    """Compares what a guarded cache skips with its guard's bound, request by request."""

    def __init__(self, cache: PrefixCache | SimulatedServer, checked_every: int = 1) -> None:
        guard = cache.decisions.guard
        assert guard is not None
        self.cache, self.guard, self.checked_every = cache, guard, checked_every
        self.lru = self.lead = self.held = self.positions = self.prompt = 0
        self.requests = 0
        self.missed: set[bytes] = set()  # where LRU resumed and this did not, in this phase of recency
        self.missed_again = 0

    def serve(self, tokens: Tokens, n_input: int) -> None:
        shadow, cache = self.guard.shadow, self.cache
        head = (1 << 30,)  # the namespace of nobody
        key = np.concatenate((np.array(head, np.int32), tokens[:n_input]))
        lru = max(0, shadow.tree.match(key, key.size - 1).resume_tokens - len(head))
        self.requests += 1
        hit = cache.lookup(tokens[:n_input], float(self.requests))
        self.lead += hit - lru
        self.lru += lru
        if not self.guard.by_recency:
            self.missed.clear()
        elif hit < lru:
            self.missed_again += tokens[:lru].tobytes() in self.missed
            self.missed.add(tokens[:lru].tobytes())
        cache.commit(tokens, n_input, float(self.requests))
        if self.requests % self.checked_every == 0:
            cache.check()
        states = [node.end for node in walk(shadow.tree) if node.state is not None]
        self.held = max(self.held, shadow.tree.kv_tokens)
        self.positions = max(self.positions, sum(states))
        self.prompt = max(self.prompt, n_input)

    @property
    def bound(self) -> float:
        once = (DEBT + SAVINGS) * self.held + self.prompt + self.positions
        return once * (3 + math.log2(1 + self.guard.shadow.turnovers))


@st.composite
def requests(draw: st.DrawFn, unit: int) -> list[tuple[list[int], int]]:
    """Requests over a few prompts: pieces of `unit` tokens each, the last ones of them answered."""
    phases = []
    for _ in range(draw(st.integers(1, 5))):
        first, items = draw(st.integers(0, 40)), draw(st.integers(1, 30))
        length, count = draw(st.integers(1, 8)), draw(st.integers(1, 40))
        style = draw(st.sampled_from(("turn", "random", "grow", "part")))
        phases.append((first, items, length, count, style))
    rng, found, fresh = np.random.default_rng(draw(st.integers(0, 9))), [], 1000
    for first, items, length, count, style in phases:
        for at in range(count):
            item = first + (int(rng.integers(items)) if style == "random" else at % items)
            pieces = [item * 10 + k for k in range(length)]
            if style == "grow":
                pieces += [5000 + item * 20 + k for k in range(at // items)]
            if style == "part":
                pieces = pieces[: 1 + at % length]
            fresh += 2
            found.append(([*pieces, fresh, fresh + 1], len(pieces) + 1))
    return found


def pieces(numbers: list[int], unit: int) -> Tokens:
    return np.concatenate([np.random.default_rng(n).integers(0, 32_000, unit).astype(np.int32) for n in numbers])


@pytest.mark.parametrize("order", [Worst, Whim])
@given(trace=requests(30), states=st.integers(2, 12))
@seed(1)
@settings(max_examples=40, deadline=None)
def test_the_bound_holds_for_one_budget(order: type[Worst], trace: list[tuple[list[int], int]], states: int) -> None:
    account = Account(one_budget(order, states))
    for numbers, n in trace:
        account.serve(pieces(numbers, 30), n * 30)
        assert account.lead >= -account.bound
        assert account.missed_again == 0


@pytest.mark.parametrize("order", [Worst, Whim])
@given(trace=requests(GRID), states=st.integers(2, 12))
@seed(2)
@settings(max_examples=40, deadline=None)
def test_the_bound_holds_for_two_pools(order: type[Worst], trace: list[tuple[list[int], int]], states: int) -> None:
    account = Account(two_pools(order, states))
    for numbers, n in trace:
        account.serve(pieces(numbers, GRID), n * GRID)
        assert account.lead >= -account.bound


def alternating(requests: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """Small sets of prompts that take turns: what was used last comes again, for a while."""
    rng = np.random.default_rng(seed)
    for at in range(requests):
        if at % 97 == 0:
            items, first, length = int(rng.integers(3, 7)), int(rng.integers(30)), int(rng.integers(4, 8))
        prompt = [(first + at % items) * 10 + k for k in range(length)]
        yield [*prompt, 10_000 + at], length


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("pools", [False, True])
def test_without_a_guard_the_worst_order_is_beyond_the_bound_in_the_end(pools: bool, seed: int) -> None:
    account = Account(two_pools(Worst, 16) if pools else one_budget(Worst, 16), checked_every=50)
    alone = two_pools(Worst, 16, guarded=False) if pools else one_budget(Worst, 16, guarded=False)
    unit, hits = GRID if pools else 30, 0
    for at, (numbers, n) in enumerate(alternating(2500, seed)):
        tokens = pieces(numbers, unit)
        hits += alone.lookup(tokens[: n * unit], float(at))
        alone.commit(tokens, n * unit, float(at))
        account.serve(tokens, n * unit)
        assert account.lead >= -account.bound
    assert account.guard.relapses > 0
    assert hits - account.lru < -account.bound


def hot_after_cold(seed: int, question: int = 0, requests: int = 300) -> Iterator[tuple[Tokens, int, bool]]:
    """30 prompts of 1,500 tokens twice, then five of 200 for ever: (tokens, input length, whether of the five)."""
    rng = np.random.default_rng(seed)
    cold, hot = ([text(rng, n) for _ in range(count)] for n, count in ((1500, 30), (200, 5)))
    answers = [text(rng, 16) for _ in range(35)]
    for i in range(60 + requests):
        late = i >= 60
        prompt = np.concatenate((hot[i % 5] if late else cold[i % 30], text(rng, question)))
        yield np.concatenate((prompt, answers[30 + i % 5 if late else i % 30])), prompt.size, late


def hot_share(pools: SimulatedServer, seed: int) -> list[float]:
    """Which share of what can be skipped of the hot prompts is, of each request in order."""
    shares = []
    for i, (tokens, n_input, late) in enumerate(hot_after_cold(seed)):
        hit = pools.lookup(tokens[:n_input], i * 0.25)
        pools.commit(tokens, n_input, i * 0.25)
        if late:
            shares.append(hit / (200 // GRID * GRID))
    pools.check()
    return shares


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["forecast", "marconi-online"])
def test_a_hot_set_of_short_prompts_does_not_starve_behind_long_ones(policy: str, seed: int) -> None:
    guarded, alone = (hot_share(SimulatedServer(MODEL, SHAPE, policy, guarded), seed) for guarded in (True, False))
    assert np.mean(alone[100:]) < 0.5
    assert min(guarded[100:]) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_with_one_budget_the_hot_set_is_served_behind_the_worst_order(seed: int) -> None:
    """By itself the forecast serves it there; what the guard adds is that no order can fail to."""
    last_hits = []
    for guarded in (True, False):
        policy = POLICIES["forecast"]._replace(eviction=lambda _: Worst(), guarded=guarded)
        cache = PrefixCache(MODEL, 24 * 826_368, policy)
        hits = []
        for i, (tokens, n_input, _) in enumerate(hot_after_cold(seed, question=20)):
            hits.append(cache.lookup(tokens[:n_input], i * 0.25))
            cache.commit(tokens, n_input, i * 0.25)
        cache.check()
        last_hits.append(hits[-100:])
    assert min(last_hits[0]) == 200
    assert np.mean(last_hits[1]) < 100


@pytest.mark.parametrize("policy", ["forecast", "marconi-online"])
def test_what_a_guard_decides_is_decided_again_by_a_replay(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log, pools = RequestLog(path, 50_000_000), SimulatedServer(MODEL, SHAPE, policy)
    pools.decisions = RecordedDecisions(log, MODEL, policy, GRID)
    hot_share(pools, 0)
    assert pools.decisions.guard is not None
    assert pools.decisions.guard.relapses > 0
    log.close()
    found = replay(path)
    assert found.complete
    assert found.evictions > 20
    assert found.differences == []


def test_the_shadow_is_lru_and_counts_what_comes_in() -> None:
    shadow = ShadowLru(kv_bytes=1, state_bytes=1)
    one, two, three = (np.arange(i * 100, i * 100 + 50, dtype=np.int32) for i in range(3))
    shadow.save(one, [20, 50])
    shadow.save(two, [50])
    shadow.check()
    assert (shadow.tree.states, shadow.tree.kv_tokens) == (3, 100)
    assert shadow.match(one[:30], 30).resume_tokens == 20
    shadow.fit(states=2)  # the end of `one` was used longest ago, and its KV with it
    shadow.check()
    assert (shadow.match(one, 49).resume_tokens, shadow.tree.kv_tokens) == (20, 70)
    turnovers = shadow.turnovers
    shadow.save(three, [50])
    assert shadow.turnovers == pytest.approx(turnovers + 50 / 120)
    shadow.fit(kv_tokens=70)
    shadow.check()
    assert [shadow.match(tokens, 50).resume_tokens for tokens in (one, two, three)] == [20, 0, 50]
    shadow.clear()
    shadow.check()
    assert shadow.tree.states == shadow.tree.kv_tokens == shadow.match(one, 50).resume_tokens == 0


def test_requests_that_could_not_skip_anything_are_not_in_the_account() -> None:
    guard, tokens = Guard(1, 1), np.arange(100, dtype=np.int32)
    guard.shadow.save(tokens, [100])
    for _ in range(20):
        assert guard.arrive(tokens, 0, 0).resume_tokens == 0
    assert not guard.by_recency
    assert guard.arrive(tokens, 100, 0).resume_tokens == 100
    assert (guard.by_recency, guard.owed, guard.relapses) == (True, 100, 1)
    guard.check()
