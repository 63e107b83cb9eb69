"""Agents that contend for states: every server is asked the same, and the simulator gives rates for what was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import contention, load
from sglang_hybrid.core.spec import from_config, preset

SHAPE = contention.Shape((640, 960), 4, 3, (2, 4), (10, 20), (70, 90), 4, 0.001, (2, 128))


class Recorder(load.Client):
    """Answers with the same tokens; says of every prompt that `cached` of its tokens were cached."""

    def __init__(self, cached: int = 0) -> None:
        super().__init__("")
        self.cached, self.prompts = cached, list[list[int]]()

    def flush(self) -> None:
        self.prompts.clear()

    def ask(self, prompt: Any, tokens: int, logprobs: bool = False) -> dict[str, Any]:
        self.prompts.append(list(prompt))
        cached = min(self.cached, len(prompt))
        return {"ids": [7] * tokens, "ttft_s": 0.001, "prompt_tokens": len(prompt), "cached_tokens": cached}


def test_every_server_is_asked_the_same_prompts() -> None:
    one, other = Recorder(), Recorder()
    first, second = contention.ask(one, SHAPE), contention.ask(other, SHAPE)
    assert sorted(one.prompts) == sorted(other.prompts)
    assert first["requests"] == second["requests"] == len(one.prompts) >= 2 * SHAPE.sessions
    assert first["hit_rate"] == 0.0
    assert 0 < first["later_turns"]["requests"] < first["requests"]


def test_what_was_computed_counts() -> None:
    found = contention.ask(Recorder(cached=600), SHAPE)
    prompts = sum(row[3] for row in found["rows"])
    assert found["hit_rate"] == pytest.approx(600 * found["requests"] / prompts)
    assert found["computed_p95"] < 1300 - 600


def test_the_simulator_replays_what_was_asked(tmp_path: Path) -> None:
    contention.write(tmp_path / "model")
    found = contention.ask(Recorder(), SHAPE)
    rates = contention.simulated(tmp_path / "model", found)
    assert set(rates) == {"forecast", "lru", "endless"}
    assert 0.5 < rates["endless"] < 1.0
    assert rates["endless"] >= max(rates["forecast"], rates["lru"]) > 0.0


def test_the_model_has_the_size_it_says(tmp_path: Path) -> None:
    contention.write(tmp_path / "model")
    mine, published = from_config(tmp_path / "model"), preset("qwen3.5-35b-a3b")
    assert mine.checkpoint_bytes == published.checkpoint_bytes
    assert mine.kv_bytes_per_token == published.kv_bytes_per_token
    assert mine.flops_per_token == pytest.approx(published.flops_per_token, rel=0.2)
