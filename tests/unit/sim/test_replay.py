"""Replay, metrics and the latency line, with a cache whose answers are known."""

from collections.abc import Iterator

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.latency import H100, HARDWARE, CostModel
from sglang_hybrid.sim.metrics import hit_columns, measure
from sglang_hybrid.sim.replay import replay
from sglang_hybrid.sim.trace import Tokens, Trace, make_request, make_trace
from sglang_hybrid.sim.workloads import generate

MODEL = preset("marconi-7b")


class Script:
    """A cache that plays back hits and byte counts and writes down what it was asked."""

    def __init__(self, hits: list[int], used: list[int]) -> None:
        self.hits, self.used = hits, used
        self.calls: list[tuple[str, int, float]] = []

    def lookup(self, tokens: Tokens, now: float) -> int:
        self.calls.append(("lookup", len(tokens), now))
        return self.hits.pop(0)

    def commit(self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = ()) -> None:
        self.calls.append(("commit", len(tokens), now))

    def used_bytes(self) -> int:
        return self.used.pop(0)


def two_requests() -> Trace:
    return make_trace("t", [make_request([1] * 4, [2], 0.0, "a"), make_request([1] * 10, [2, 3], 2.0, "a")])


def ticks(step: float = 1e-6) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def test_each_request_looks_up_its_input_and_commits_everything() -> None:
    cache, clock = Script([0, 4], [50, 60]), ticks()
    result = replay(two_requests(), cache, 100, lambda: next(clock))
    result.check()
    assert cache.calls == [("lookup", 4, 0.0), ("commit", 5, 0.0), ("lookup", 10, 2.0), ("commit", 12, 2.0)]
    columns = measure(result, MODEL, np.array([0, 3]))
    assert (columns["hit_tokens"], columns["input_tokens"], columns["token_hit_rate"]) == (4, 14, 0.285714)
    assert columns["uncached_tokens"]["p50"] == 5.0
    assert columns["flops_saved"] == MODEL.prefill_flops(4)
    assert columns["flop_hit_rate"] == round(
        MODEL.prefill_flops(4) / (MODEL.prefill_flops(4) + MODEL.prefill_flops(10)), 6
    )
    assert columns["decision_us_mean"] == 2.0
    assert columns["false_hits"] == 1
    assert columns["gb_over_time"] == [(0.0, 0.0), (2.0, 0.0)]


def test_a_cache_over_its_capacity_is_found() -> None:
    result = replay(two_requests(), Script([0, 0], [100, 101]), 100)
    assert result.over_capacity_requests == 1
    with pytest.raises(InvariantError, match="held more than its 100 bytes: 101"):
        result.check()


@pytest.mark.parametrize("hits", [[0, 11], [-1, 0]])
def test_impossible_hits_are_found(hits: list[int]) -> None:
    with pytest.raises(InvariantError, match="the cache skipped"):
        replay(two_requests(), Script(hits, [1, 1]), 100).check()


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_capacity_is_positive(capacity: int) -> None:
    with pytest.raises(ConfigError, match="positive number of bytes"):
        replay(two_requests(), Script([0, 0], [0, 0]), capacity)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_larger_than_the_cache_neither_fits_nor_harms(policy: str) -> None:
    small, big = list(range(100, 140)), list(range(1000, 9000))
    capacity = MODEL.checkpoint_bytes * 3 + 200 * MODEL.kv_bytes_per_token
    rows = [(small, 0.0), ([*small, 1], 1.0), (big, 2.0), ([*big, 1], 3.0), ([*small, 1, 2], 4.0)]
    trace = make_trace("t", [make_request(ids, [7, 8], ts, "s") for ids, ts in rows])
    result = replay(trace, open_cache(policy, capacity, MODEL), capacity)
    result.check()
    assert result.hit_tokens[2] == 0
    assert result.hit_tokens[3] <= 8000
    assert result.used_bytes.max() <= capacity


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_skips_what_never_came_before(policy: str) -> None:
    from sglang_hybrid.sim.reuse import ReuseIndex

    trace = generate("swebench", 3, sessions=8)
    result = replay(trace, open_cache(policy, 3 * 10**9, MODEL), 3 * 10**9)
    result.check()
    assert (result.hit_tokens <= ReuseIndex(trace).seen_tokens).all()


def test_the_latency_line_counts_only_uncached_flops() -> None:
    n, hits = np.array([1000, 1000, 1000]), np.array([0, 400, 1000])
    ttft = H100.ttft_s(MODEL, n, hits)
    assert ttft[0] == pytest.approx(0.015 + MODEL.prefill_flops(1000) / (0.5 * 989e12))
    assert ttft[1] == pytest.approx(0.015 + MODEL.prefill_flops(1000, 400) / (0.5 * 989e12))
    assert ttft[2] == pytest.approx(0.015 + MODEL.prefill_flops(1000, 999) / (0.5 * 989e12))
    with pytest.raises(ConfigError, match="price per FLOP"):
        CostModel(0.0, 0.0)


def test_the_fitted_line_gives_the_published_prefill_times() -> None:
    """Jamba-1.5-Mini on four A100: the artifact measured about 180, 817 and 1632 ms at these lengths."""
    n = np.array([3050, 15050, 30050])
    ttft = HARDWARE["4xa100"].ttft_s(preset("jamba-1.5-mini"), n, np.zeros(3, dtype=np.int64))
    assert ttft.tolist() == pytest.approx([0.180, 0.817, 1.632], rel=0.03)


def test_hit_rates_by_length_cover_all_requests() -> None:
    n = np.array([10, 999, 1000, 5000, 32768])
    bins = hit_columns(n, np.array([5, 0, 500, 5000, 0]), MODEL)["hit_rate_by_input_tokens"]
    assert {k: v["requests"] for k, v in bins.items()} == {"0-999": 2, "1000-1999": 1, "4000-6999": 1, "20000-32768": 1}
    assert bins["0-999"]["mean_hit_rate"] == 0.25


@pytest.mark.parametrize(("boundaries", "hit"), [((), 0), ((100,), 100)])
def test_a_declared_boundary_is_reused_by_the_next_request(boundaries: tuple[int, ...], hit: int) -> None:
    """The shared prefix ends within the first prompt, where nothing but the declaration asks for a state."""
    prompts = [np.concatenate([np.arange(100), np.arange(n, n + 20)]) for n in (1000, 2000)]
    requests = [make_request(p, [], float(i), "s", boundaries=boundaries) for i, p in enumerate(prompts)]
    capacity = 10**12
    result = replay(make_trace("t", requests), open_cache("forecast", capacity, "qwen3.5-35b-a3b"), capacity)
    assert result.hit_tokens.tolist() == [0, hit]
