"""Caches opened by name: honest lookups, an enforced budget, and defined behaviour for bad input."""

import dataclasses

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.prefix.tree.check import walk
from sglang_hybrid.prefix.tree.mark import Kind
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.saving import Saving
from tests.prompts import text

HYBRID = ModelSpec("hybrid", kv_bytes_per_token=10, checkpoint_bytes=400, flops_per_token=1.0, flops_per_token_pair=0.0)
TRANSFORMER = dataclasses.replace(HYBRID, name="transformer", checkpoint_bytes=0)
PURE_SSM = dataclasses.replace(HYBRID, name="ssm", kv_bytes_per_token=0)
MODELS = (HYBRID, TRANSFORMER, PURE_SSM)
ANYWHERE = Saving(grid=1, buffered=False)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_resumes_from_its_last_turn(policy: str, model: ModelSpec) -> None:
    cache, whole = open_cache(policy, 10**6, model), text(1, 300)
    assert cache.lookup(whole[:80], 0.0) == 0
    cache.commit(whole[:100], 80, 0.0)
    assert cache.lookup(whole[:150], 1.0) == 100
    cache.commit(whole[:200], 150, 1.0)
    assert cache.lookup(whole[:250], 2.0) == 200
    cache.check()


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_budget_holds_after_every_commit_under_pressure(policy: str, model: ModelSpec) -> None:
    cache, rng = open_cache(policy, 6000, model), np.random.default_rng(7)
    sessions = [text(seed, 900) for seed in range(8)]
    sessions[1][:60] = sessions[2][:60] = sessions[0][:60]
    ends = [40] * len(sessions)
    for step in range(160):
        which = int(rng.integers(len(sessions)))
        end = ends[which] = ends[which] + int(rng.integers(1, 12))
        hit = cache.lookup(sessions[which][: end - 3], float(step))
        assert 0 <= hit < end - 3
        cache.commit(sessions[which][:end], end - 3, float(step))
        assert cache.used_bytes() <= 6000
        cache.check()


@pytest.mark.parametrize("answer", [0, 1, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_prompt_again_is_served_where_states_are_saved_at_ends_of_prompts(policy: str, answer: int) -> None:
    cache, whole = open_cache(policy, 10**6, HYBRID, ANYWHERE), text(1, 100 + answer)
    cache.commit(whole, 100, 0.0)
    never = ("marconi-paper", "lru")  # SGLang's no_buffer has the state behind the prompt alone
    assert cache.lookup(whole[:100], 1.0) == (0 if policy in never else 99)
    if answer and policy not in never:
        ends = [node.state.kind for node in walk(cache.tree) if node.end == 99 and node.state is not None]
        assert ends == [Kind.SUPERSEDED], "the next turn goes on behind the answer"
    cache.check()


@pytest.mark.parametrize("saving", [ANYWHERE, Saving(16, track_tokens=32), Saving(16, 16), Saving(1, 0, False)])
@pytest.mark.parametrize("policy", POLICIES)
def test_ends_of_prompts_stay_within_the_budget(policy: str, saving: Saving) -> None:
    cache, rng = open_cache(policy, 6000, HYBRID, saving), np.random.default_rng(7)
    prompts = [text(seed, 20 + 12 * seed) for seed in range(8)]
    for step in range(200):
        prompt = prompts[int(rng.integers(len(prompts)))]
        cache.lookup(prompt, float(step))
        cache.commit(np.concatenate((prompt, text(100 + step, step % 6))), prompt.size, float(step))
        assert cache.used_bytes() <= 6000
        cache.check()


def test_a_prompt_end_that_was_just_saved_outlives_older_ones() -> None:
    cache = open_cache("recency", 4000, HYBRID, ANYWHERE)
    for seed in range(6):
        cache.commit(text(seed, 100), 100, float(seed))
        assert cache.lookup(text(seed, 100), seed + 0.5) == 99


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_input_token_is_always_computed(policy: str, model: ModelSpec) -> None:
    cache, prompt = open_cache(policy, 10**6, model), text(1, 64)
    cache.commit(prompt, 64, 0.0)
    assert cache.lookup(prompt, 1.0) <= 63


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_larger_than_the_cache_is_not_held(policy: str) -> None:
    cache = open_cache(policy, 2000, HYBRID)
    cache.commit(text(1, 100), 90, 0.0)
    cache.commit(text(2, 5000), 4000, 1.0)
    cache.check()
    assert cache.used_bytes() <= 2000
    blocks_that_fit = 64 if policy == "vllm+" else 0
    assert cache.lookup(text(2, 5000), 2.0) == blocks_that_fit


@pytest.mark.parametrize("policy", POLICIES)
def test_pure_transformers_keep_the_part_that_fits(policy: str) -> None:
    cache = open_cache(policy, 2000, TRANSFORMER)
    cache.commit(text(2, 5000), 4000, 1.0)
    assert cache.lookup(text(2, 5000), 2.0) == 200
    cache.check()


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_capacity_zero_holds_nothing(policy: str, model: ModelSpec) -> None:
    cache = open_cache(policy, 0, model)
    for _ in range(3):
        cache.commit(text(1, 40), 30, 0.0)
        assert cache.used_bytes() == 0
        cache.check()


def test_unknown_names_and_sizes_are_refused() -> None:
    for policy in ("", "lru2", "marconi:", "marconi:x", "marconi:-1", "lru:1"):
        with pytest.raises(ConfigError):
            open_cache(policy, 100, HYBRID)
    with pytest.raises(ConfigError):
        open_cache("lru", -1, HYBRID)
    with pytest.raises(ConfigError):
        open_cache("lru", 100, "no-such-model")


@pytest.mark.parametrize("policy", ["lru", "forecast"])
def test_bad_requests_are_refused_and_leave_no_trace(policy: str) -> None:
    cache, good = open_cache(policy, 10**6, HYBRID), text(1, 40)
    for tokens in ([-1], [2**31], [[1]], [0.5]):
        with pytest.raises(ConfigError):
            cache.lookup(tokens, 0.0)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            cache.commit(tokens, 1, 0.0)  # type: ignore[arg-type]
    for n_input in (-1, 41):
        with pytest.raises(ConfigError):
            cache.commit(good, n_input, 0.0)
    for boundary in (0, 31, -2):
        with pytest.raises(ConfigError):
            cache.commit(good, 30, 0.0, boundaries=(boundary,))
    for now in (float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            cache.commit(good, 30, now)
    cache.check()
    assert cache.used_bytes() == 0
    assert cache.lookup(good, 0.0) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_requests_and_a_clock_going_backwards_are_defined(policy: str) -> None:
    cache = open_cache(policy, 4000, HYBRID)
    assert cache.lookup([], 5.0) == 0  # type: ignore[arg-type]
    cache.commit([], 0, 5.0)  # type: ignore[arg-type]
    for step, now in enumerate((100.0, 3.0, -50.0, 101.0)):
        cache.commit(text(step, 100), 0 if step == 2 else 90, now)
        cache.check()
    assert cache.used_bytes() <= 4000


def test_forecast_takes_branch_and_end_in_one_pass_after_the_kv_was_evicted() -> None:
    cache, shared = open_cache("forecast", 4000, HYBRID), text(1, 200)
    cache.commit(np.concatenate([shared, text(2, 50)]), 240, 0.0)
    for seed in range(10, 20):
        cache.commit(text(seed, 120), 100, float(seed))
    assert cache.lookup(np.concatenate([shared, text(3, 50)]), 30.0) == 0
    done = cache.commit(np.concatenate([shared, text(3, 50)]), 240, 30.0)
    assert done.positions == (200, 250)


def test_declared_boundary_is_reused_from_the_second_sighting() -> None:
    system = text(1, 64)
    for boundaries, hit in (((), 0), ((64,), 64)):
        cache = open_cache("forecast", 10**6, HYBRID)
        cache.commit(np.concatenate([system, text(2, 30)]), 90, 0.0, boundaries)
        assert cache.lookup(np.concatenate([system, text(3, 30)]), 1.0) == hit


def test_seeded_prefix_is_checkpointed_by_its_first_request() -> None:
    cache, system = open_cache("forecast", 10**6, HYBRID), text(1, 64)
    cache.seed(system, 0.0)
    assert cache.commit(np.concatenate([system, text(2, 30)]), 90, 1.0).positions == (64, 94)
    assert cache.lookup(np.concatenate([system, text(3, 30)]), 2.0) == 64


def test_marconi_needs_three_sightings_of_a_shared_input() -> None:
    cache, shared = open_cache("marconi", 10**6, HYBRID), text(1, 64)
    hits = []
    for seed in range(2, 6):
        asked = np.concatenate([shared, text(seed, 30)])
        hits.append(cache.lookup(asked, float(seed)))
        cache.commit(asked, 90, float(seed))
    assert hits == [0, 0, 64, 64]


def test_lru_refreshes_only_the_checkpoint_used() -> None:
    cache, whole = open_cache("lru", 10**6, HYBRID), text(1, 300)
    cache.commit(whole[:100], 90, 0.0)
    cache.commit(whole[:200], 150, 1.0)
    cache.commit(whole[:300], 250, 2.0)
    marks = {n.end: n.state for n in cache.tree.match(whole).node.base().base().children.values()}
    assert {end: m.kind for end, m in marks.items() if m} == {200: Kind.SUPERSEDED}
    used = {node.end: node.state.touch for node in walk(cache.tree) if node.state is not None}
    assert sorted(used, key=used.__getitem__) == [100, 200, 300]


def test_a_sequence_larger_than_the_cache_costs_the_others_nothing() -> None:
    cache, small = open_cache("forecast", 6000, HYBRID), text(1, 100)
    cache.commit(small, 80, 0.0)
    cache.commit(text(2, 5000), 4990, 1.0)
    assert cache.lookup(np.concatenate((small, text(3, 5))), 2.0) == 100
    cache.check()
