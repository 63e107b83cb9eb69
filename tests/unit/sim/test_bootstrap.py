"""Marconi's weight by the paper's bootstrap and replay."""

from collections.abc import Callable, Iterable, Iterator

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.tree.check import check, walk
from sglang_hybrid.sim.bootstrap import (
    ALPHAS,
    PUBLISHED_ALPHAS,
    LoggedRequest,
    MarconiCache,
    ReplayJob,
    replay_hit_tokens,
)
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.snapshot import save
from tests.prompts import text

MODEL = ModelSpec("hybrid", kv_bytes_per_token=1, checkpoint_bytes=400, flops_per_token=1.0, flops_per_token_pair=0.0)


def long_and_short(turns: int) -> list[LoggedRequest]:
    """Three long conversations that return among one-off short ones: FLOP efficiency should win."""
    requests, clock = [], 0.0
    long = [text(seed, 4000) for seed in range(3)]
    for turn in range(turns):
        for session, whole in enumerate(long):
            end = 500 + 20 * turn
            requests.append(LoggedRequest(whole[:end], end - 10, clock))
            for one_off in range(4):
                clock += 1.0
                requests.append(LoggedRequest(text(1000 + 100 * turn + 10 * session + one_off, 30), 20, clock))
    return requests


def hit_tokens(cache: object, requests: list[LoggedRequest]) -> int:
    total = 0
    for r in requests:
        total += cache.lookup(r.tokens[: r.n_input], r.now)  # type: ignore[attr-defined]
        cache.commit(r.tokens, r.n_input, r.now)  # type: ignore[attr-defined]
    return total


def test_snapshot_restores_the_same_cache() -> None:
    cache = open_cache("marconi:0.5", 5000, MODEL)
    requests = long_and_short(6)
    hit_tokens(cache, requests[:40])
    copy = open_cache("marconi:0.5", 5000, MODEL)
    copy.load(save(cache.tree))
    check(copy.tree)
    assert copy.used_bytes() == cache.used_bytes()
    described = [sorted((n.start, n.end, n.state.touch) for n in walk(c.tree) if n.state) for c in (cache, copy)]
    assert described[0] == described[1]
    assert hit_tokens(copy, requests[40:]) == hit_tokens(cache, requests[40:])


def test_snapshots_are_refused_where_they_do_not_fit() -> None:
    cache = open_cache("marconi:0", 5000, MODEL)
    hit_tokens(cache, long_and_short(2))
    with pytest.raises(ConfigError, match="empty"):
        cache.load(save(cache.tree))
    with pytest.raises(ConfigError, match="bytes"):
        open_cache("marconi:0", 500, MODEL).load(save(cache.tree))


def test_bootstrap_replays_the_window_once_and_takes_the_best_alpha() -> None:
    asked: list[ReplayJob] = []

    def grid(run: Callable[[ReplayJob], int], jobs: Iterable[ReplayJob]) -> Iterator[int]:
        asked.extend(jobs)
        return map(run, asked)

    cache = MarconiCache(MODEL, 5000, multiplier=5, grid_map=grid, retunes=0, neighbours=0)
    requests = long_and_short(30)
    first_eviction = next(i for i, r in enumerate(requests, 1) if cache.commit(r.tokens, r.n_input, r.now).evicted)
    assert (cache.alpha, cache.tuned) == (0.0, False)
    hit_tokens(cache, requests[first_eviction:])
    assert [job.alpha for job in asked] == list(ALPHAS)
    assert asked[0].requests[0].now == requests[first_eviction].now
    assert len(asked[0].requests) == 5 * first_eviction
    hits = [replay_hit_tokens(job) for job in asked]
    assert hits[ALPHAS.index(cache.alpha)] == max(hits)
    assert cache.alpha > 0.0


def test_later_tunings_replay_a_log_twice_as_long_and_the_last_one_is_for_good() -> None:
    windows: list[int] = []

    def grid(run: Callable[[ReplayJob], int], jobs: Iterable[ReplayJob]) -> Iterator[int]:
        asked = list(jobs)
        windows.append(len(asked[0].requests))
        return map(run, asked)

    cache = MarconiCache(MODEL, 5000, multiplier=1, grid_map=grid, retunes=2)
    hit_tokens(cache, long_and_short(30))
    assert windows == [windows[0], 2 * windows[0], 4 * windows[0]]
    assert cache.tuned


def test_an_alpha_counts_with_its_neighbours() -> None:
    lone_peak = [0] * len(PUBLISHED_ALPHAS)
    lone_peak[3], lone_peak[10:15] = 100, [60] * 5

    def grid(run: Callable[[ReplayJob], int], jobs: Iterable[ReplayJob]) -> Iterator[int]:
        return iter(lone_peak[: len(list(jobs))])

    for neighbours, alpha in ((0, PUBLISHED_ALPHAS[3]), (2, PUBLISHED_ALPHAS[12])):
        tuner = {"retunes": 0, "neighbours": neighbours}
        cache = MarconiCache(MODEL, 5000, multiplier=1, grid_map=grid, alphas=PUBLISHED_ALPHAS, **tuner)
        hit_tokens(cache, long_and_short(30))
        assert cache.alpha == alpha


def test_alpha_stays_zero_without_evictions_and_windows_must_be_positive() -> None:
    cache = MarconiCache(MODEL, 10**9)
    hit_tokens(cache, long_and_short(3))
    assert (cache.alpha, cache.tuned) == (0.0, False)
    with pytest.raises(ConfigError):
        MarconiCache(MODEL, 100, multiplier=0)
    with pytest.raises(ConfigError):
        MarconiCache(MODEL, 100, retunes=-1)
    with pytest.raises(ConfigError):
        MarconiCache(MODEL, 100, alphas=())
