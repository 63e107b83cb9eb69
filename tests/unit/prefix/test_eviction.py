"""Eviction policies: what each formula says, and that every index returns the argmin of the batch scores."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest

from sglang_hybrid.core.arrays import FloatArray
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.eviction.candidates import Candidate, Candidates, VictimIndex
from sglang_hybrid.prefix.eviction.forecast import Forecast, ForecastIndex
from sglang_hybrid.prefix.eviction.gdsf import Gdsf, densities, density
from sglang_hybrid.prefix.eviction.lru import RecencyQueues
from sglang_hybrid.prefix.eviction.marconi import FlopAware, FlopAwareIndex, flop_efficiency
from sglang_hybrid.prefix.reuse.table import EDGES_LIST, Prior, ReuseTable

MODEL = preset("marconi-7b")
CLASSES = 6


class Scores(Protocol):
    """What an index is held against: one score for each of a batch of candidates, of which the lowest goes first."""

    def scores(self, candidates: Candidates, now: float) -> FloatArray: ...


class Recency:
    def scores(self, candidates: Candidates, now: float) -> FloatArray:
        return candidates.touch.astype(np.float64)


class SupersededFirst:
    def scores(self, candidates: Candidates, now: float) -> FloatArray:
        newest = float(candidates.touch.max(initial=0)) + 1.0
        return np.asarray(candidates.touch - np.where(candidates.superseded, newest, 0.0), dtype=np.float64)


def some(candidate_id: int, **changes: float) -> Candidate:
    values: dict[str, float] = {
        "id": candidate_id, "end_tokens": 100, "base_tokens": 0, "parent_tokens": 0, "freed_kv_tokens": 100,
        "states": 1, "children": 0, "last_s": 1.0, "touch": candidate_id, "hits": 0, "superseded": False,
        "reuse_class": 0,
    }  # fmt: skip
    return Candidate(**(values | changes))  # type: ignore[arg-type]


def drawn(rng: np.random.Generator, candidate_id: int, touch: int, last_s: float) -> Candidate:
    end = int(rng.integers(2, 5000))
    base, parent = sorted(rng.integers(0, end, 2).tolist())
    children = int(rng.integers(0, 3))
    return some(
        candidate_id, end_tokens=end, base_tokens=base, parent_tokens=parent, children=children, touch=touch,
        freed_kv_tokens=0 if children else end - parent, last_s=last_s, hits=int(rng.integers(0, 4)),
        superseded=bool(rng.integers(0, 2)), reuse_class=int(rng.integers(0, CLASSES)),
    )  # fmt: skip


def lru(_: np.random.Generator) -> tuple[Scores, VictimIndex]:
    return Recency(), RecencyQueues()


def superseded(_: np.random.Generator) -> tuple[Scores, VictimIndex]:
    return SupersededFirst(), RecencyQueues(superseded_first=True)


def gdsf(_: np.random.Generator) -> tuple[Scores, VictimIndex]:
    policy = Gdsf(MODEL)
    return policy, policy


def marconi(_: np.random.Generator) -> tuple[Scores, VictimIndex]:
    policy = FlopAware(MODEL, 0.7)
    return policy, FlopAwareIndex(policy)


def forecast(rng: np.random.Generator) -> tuple[Scores, VictimIndex]:
    table = ReuseTable([Prior()] * CLASSES)
    table.index[:] = rng.random(table.index.shape) + 0.01
    policy = Forecast(MODEL, table)
    return policy, ForecastIndex(policy)


@pytest.mark.parametrize("build", [lru, superseded, gdsf, marconi, forecast])
@pytest.mark.parametrize("seed", range(3))
def test_index_pops_the_lowest_batch_score(
    build: Callable[[np.random.Generator], tuple[Scores, VictimIndex]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    policy, index = build(rng)
    live: dict[int, Candidate] = {}
    now, popped = 0.0, 0
    for step in range(1, 500):
        now += float(rng.exponential(3.0))
        action = rng.random()
        if action < 0.6 or not live:
            candidate = drawn(rng, int(rng.integers(1, 80)), step, now)
            live[candidate.id] = candidate
            index.put(candidate)
        elif action < 0.7:
            gone = int(rng.choice(list(live)))
            del live[gone]
            index.discard(gone)
        else:
            batch = Candidates.of(live.values())
            scores = dict(zip(batch.id.tolist(), policy.scores(batch, now).tolist(), strict=True))
            victim = index.pop(now)
            lowest = min(scores.values())
            if victim is None:
                assert not np.isfinite(lowest)  # Marconi: no candidate with at most one child
                continue
            assert scores[victim] == pytest.approx(lowest, rel=1e-9)
            del live[victim]
            popped += 1
        index.check()
    assert popped > 50


@pytest.mark.parametrize("build", [lru, superseded, gdsf, marconi, forecast])
def test_empty_index_has_no_victim_and_forgets_unknown_ids(
    build: Callable[[np.random.Generator], tuple[Scores, VictimIndex]],
) -> None:
    policy, index = build(np.random.default_rng(0))
    index.discard(7)
    assert index.pop(0.0) is None
    assert len(index) == 0
    assert policy.scores(Candidates.of([]), 0.0).shape == (0,)


def test_recency_serves_the_older_of_checkpoints_and_bare_kv() -> None:
    queues = RecencyQueues()
    for candidate in (some(1, touch=3), some(2, touch=1, states=0), some(3, touch=4), some(4, touch=2)):
        queues.put(candidate)
    assert [queues.pop(0.0) for _ in range(4)] == [2, 4, 1, 3]


def test_superseded_goes_before_older_entries() -> None:
    queues = RecencyQueues(superseded_first=True)
    for candidate in (some(1), some(2), some(3, superseded=True)):
        queues.put(candidate)
    assert [queues.pop(0.0) for _ in range(3)] == [3, 1, 2]


def test_marconi_is_the_paper_s_equation_two() -> None:
    rows = [
        some(1, end_tokens=1000, last_s=0.0),
        some(2, end_tokens=10, last_s=10.0),
        some(3, end_tokens=400, last_s=4.0),
    ]
    batch = Candidates.of(rows)
    saved = [MODEL.prefill_flops(n) / (MODEL.checkpoint_bytes + n * MODEL.kv_bytes_per_token) for n in (1000, 10, 400)]
    assert flop_efficiency(MODEL, batch).tolist() == pytest.approx(saved)
    middle = 0.4 + 0.5 * (saved[2] - saved[1]) / (saved[0] - saved[1])
    assert FlopAware(MODEL, 0.5).scores(batch, 99.0).tolist() == pytest.approx([0.5, 1.0, middle])


def test_marconi_keeps_nodes_with_two_children() -> None:
    policy = FlopAware(MODEL, 1.0)
    index = FlopAwareIndex(policy)
    index.put(some(1, children=2))
    assert index.pop(0.0) is None
    index.put(some(1, children=1))
    assert index.pop(0.0) == 1
    assert policy.scores(Candidates.of([some(1, children=2)]), 0.0).tolist() == [np.inf]


def test_alpha_zero_is_lru_and_negative_alpha_is_refused() -> None:
    rng = np.random.default_rng(3)
    batch = Candidates.of([drawn(rng, i, i, float(i)) for i in range(1, 30)])
    eligible = batch.children <= 1
    scores = FlopAware(MODEL, 0.0).scores(batch, 0.0)
    assert batch.id[scores.argmin()] == batch.id[eligible][batch.touch[eligible].argmin()]
    for alpha in (-0.1, float("nan")):
        with pytest.raises(ConfigError):
            FlopAware(MODEL, alpha)


def test_density_counts_only_bytes_really_freed() -> None:
    kept = density(MODEL, some(1, end_tokens=500, freed_kv_tokens=0))
    assert kept == MODEL.prefill_flops(500) / MODEL.checkpoint_bytes
    assert kept > density(MODEL, some(1, end_tokens=500, freed_kv_tokens=500))
    batch = Candidates.of([some(1, end_tokens=500, base_tokens=100), some(2, end_tokens=9)])
    assert densities(MODEL, batch).tolist() == pytest.approx([density(MODEL, row) for row in
        (some(1, end_tokens=500, base_tokens=100), some(2, end_tokens=9))])  # fmt: skip


def test_gdsf_ages_entries_by_the_score_of_victims() -> None:
    policy = Gdsf(MODEL)
    policy.put(some(1, end_tokens=1000, hits=3))
    policy.put(some(2, end_tokens=500))
    assert policy.pop(0.0) == 2
    policy.put(some(3, end_tokens=1000, hits=3))
    fresh, old = policy.scores(Candidates.of([some(3, end_tokens=1000, hits=3), some(1, end_tokens=1000, hits=3)]), 0.0)
    assert fresh > old


def test_of_what_saves_nothing_the_largest_goes_first_in_whatever_order_it_is_named() -> None:
    dead = [some(n, end_tokens=64, base_tokens=64, freed_kv_tokens=n, states=0) for n in range(1, 60)]
    for seed in range(5):
        index = ForecastIndex(Forecast(MODEL, ReuseTable([Prior()] * CLASSES)))
        index.put(some(99))
        for number in np.random.default_rng(seed).permutation(len(dead)):
            index.put(dead[number])
        assert [index.pop(5.0) for _ in range(60)] == [*range(59, 0, -1), 99]


def test_forecast_prefers_the_class_that_returns() -> None:
    table = ReuseTable([Prior()] * 2)
    table.index[0], table.index[1] = 0.001, 0.1
    index = ForecastIndex(Forecast(MODEL, table))
    index.put(some(1, reuse_class=1, last_s=0.0))
    index.put(some(2, reuse_class=0, last_s=EDGES_LIST[3]))
    assert [index.pop(EDGES_LIST[4]) for _ in range(2)] == [2, 1]
