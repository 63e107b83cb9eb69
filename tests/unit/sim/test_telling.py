"""A simulated server tells of all that it holds, so that the router's index foretells every hit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.tree.tokens import as_tokens
from sglang_hybrid.routing.index import STATE_KIND, RestartIndex, block_hashes
from sglang_hybrid.sim.shape import Shape
from sglang_hybrid.sim.telling import TellingServer

MODEL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
PAGE = 8


@pytest.mark.parametrize("policy", ["forecast", "lru"])
@pytest.mark.parametrize("seed", range(12))
def test_what_the_index_foretells_is_what_the_server_has(seed: int, policy: str) -> None:
    rng, index, hits = random.Random(seed), RestartIndex(PAGE), 0
    server = TellingServer(MODEL, Shape(12, 600, PAGE, track_tokens=16), lambda event: _apply(index, event), policy)
    index.join("a")
    running: dict[str, list[int]] = {}
    past: list[list[int]] = [[]]
    for step in range(120):
        now, name = float(step), str(step)
        if rng.random() < 0.5 and len(running) < 2:
            base = rng.choice(past)
            asked = base[: rng.randint(0, len(base))] + [rng.randint(0, 1) for _ in range(rng.randint(1, 40))]
            asked = asked[:120]
            foretold = index.reaches(asked)["a"].resume_tokens
            assert foretold == server.lookup(as_tokens(asked), now)
            server.names[name] = block_hashes(asked, PAGE)
            server.arrive(name, as_tokens(asked), now)
            running[name] = asked
            hits += foretold > 0
        elif running:
            name = rng.choice(sorted(running))
            answer = [rng.randint(0, 1) for _ in range(rng.randint(0, 30))]
            whole = running.pop(name) + answer
            past.append(whole)
            server.decode(name, len(answer), now)
            server.names[name] = block_hashes(whole, PAGE)
            server.finish(name, as_tokens(whole), now)
            del server.names[name]
        server.check()
    assert hits > 3


def _apply(index: RestartIndex, event: dict[str, Any]) -> None:
    assert index.apply("a", event)


def test_a_prompt_tells_of_its_pages_once_and_of_its_state() -> None:
    told: list[dict[str, Any]] = []
    server, asked = TellingServer(MODEL, Shape(12, 600, PAGE), told.append), [1] * 20
    server.names["x"] = names = block_hashes(asked, PAGE)
    server.arrive("x", as_tokens(asked), 0.0)
    assert told == []
    server.decode("x", 1, 0.0)
    assert [(event["block_hashes"], event["kv_cache_spec_kind"]) for event in told] == [
        (names, None),
        (names[-1:], STATE_KIND),
    ]


def test_a_model_without_states_is_refused() -> None:
    attention = ModelSpec("attention", 512, 0, 1e6, 10)
    with pytest.raises(ConfigError, match="hybrid one: attention"):
        TellingServer(attention, Shape(12, 600), lambda event: None)
