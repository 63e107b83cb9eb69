"""Simulated days: whatever clients do, every request is answered, in order, rightly, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.simulation.process import ELASTIC, ROWS, SMALL, Models, simulate

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("preset", "seed", "flags"),
    [
        ("gdn", 11, SMALL),
        pytest.param("gdn", 12, (*SMALL, "--page-size", "64", "--hybrid-policy", "marconi-online"), marks=SLOW),
        pytest.param(
            "gdn", 13, (*SMALL, "--mamba-radix-cache-strategy", "no_buffer", "--enable-priority-scheduling"), marks=SLOW
        ),
        pytest.param("gdn", 14, (*SMALL, "--schedule-policy", "lpm", "--hybrid-policy", "lru"), marks=SLOW),
        pytest.param("gdn", 15, ELASTIC, marks=SLOW),
        pytest.param("mamba2", 16, SMALL, marks=SLOW),
        pytest.param("conv", 19, (*SMALL, "--schedule-policy", "lpm"), marks=SLOW),
        pytest.param("kda", 20, SMALL, marks=SLOW),
    ],
)
def test_a_day_of_any_load_is_served(models: Models, preset: str, seed: int, flags: tuple[str, ...]) -> None:
    [result] = simulate(models(preset), seed, 3, (*flags, *ROWS), "--preset", preset)
    assert result["hit_tokens"] > 0
    assert result["counts"]["states_evicted"] > 0


@SLOW
@pytest.mark.parametrize(
    ("preset", "seed", "flags"),
    [
        ("gdn", 21, SMALL),
        ("gdn", 22, (*ELASTIC, "--enable-priority-scheduling")),
        ("mamba2", 23, (*ELASTIC, "--mamba-radix-cache-strategy", "no_buffer")),
    ],
)
def test_a_server_is_paused_in_the_middle_of_everything(
    models: Models, preset: str, seed: int, flags: tuple[str, ...]
) -> None:
    """Requests that a pause retracts begin anew, mostly in a cache that was flushed meanwhile."""
    [result] = simulate(models(preset), seed, 1, (*flags, *ROWS), "--preset", preset, "--shapes", "pauses")
    assert result["hit_tokens"] > 0


@SLOW
@pytest.mark.parametrize("memory", [SMALL, ELASTIC])
def test_the_longest_prompt_that_is_accepted_is_served(models: Models, memory: tuple[str, ...]) -> None:
    """SGLang accepts up to a page too much, which it never admits: all who come later would wait for ever."""
    flags = (*memory, *ROWS, "--page-size", "64")
    [result] = simulate(models("gdn"), 31, 1, flags, "--shapes", "longest")
    assert result["requests"] >= 16


@SLOW
def test_urgent_requests_take_the_place_of_others(models: Models) -> None:
    """Who runs gives all of its memory to one that comes later, and begins anew behind it."""
    urgent = ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "0", *ROWS)
    tiers = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_back")
    [result] = simulate(models("gdn"), 24, 2, (*ELASTIC, *tiers, *urgent), "--shapes", "long_answers")
    assert result["outputs"]["preempted"] > 0


@SLOW
@pytest.mark.parametrize(("seed", "strategy"), [(17, "extra_buffer"), (18, "no_buffer")])
def test_flashinfer_gives_back_states_behind_every_64_tokens(models: Models, seed: int, strategy: str) -> None:
    flags = (*SMALL, "--mamba-radix-cache-strategy", strategy, *ROWS)
    [result] = simulate(models("gdn"), seed, 2, flags, "--prefill", "flashinfer")
    assert result["hit_tokens"] > 0
    assert result["counts"]["written"] > 0, "states inside a prefill are saved"
