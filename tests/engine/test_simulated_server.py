"""A simulated server that is fed the requests of a real one serves every one of them the same hit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sglang_hybrid.prefix.replay import replay
from sglang_hybrid.sim import grid
from sglang_hybrid.sim.live import simulate
from tests.engine.prompts import words
from tests.engine.support import Client, Prompt

pytestmark = pytest.mark.engine

CHUNKS = ("--chunked-prefill-size", "256")
STATIC = (*CHUNKS, "--max-mamba-cache-size", "24", "--max-total-tokens", "3072")
ELASTIC = (*CHUNKS, "--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.0022")
BUFFERED = ("--mamba-radix-cache-strategy", "extra_buffer")
UNBUFFERED = ("--mamba-radix-cache-strategy", "no_buffer")
SERVERS = {
    "extra_buffer": ("gdn", "forecast", (*STATIC, *BUFFERED)),
    "no_buffer": ("gdn", "forecast", (*STATIC, *UNBUFFERED)),
    "pages": ("gdn", "forecast", (*STATIC, *BUFFERED, "--page-size", "64")),
    "elastic": ("gdn", "forecast", (*ELASTIC, *BUFFERED, "--page-size", "64")),
    "elastic_latent": ("kda", "forecast", (*ELASTIC, *BUFFERED, "--page-size", "64")),
    "stock": ("gdn", "lru", (*STATIC, *BUFFERED)),
    "marconi": ("mamba2", "marconi-online", (*STATIC, *UNBUFFERED)),
}


def converse(client: Client, requests: int, seed: int) -> None:
    """Conversations behind two system prompts, one after the other; half of the prompts have a mark near their end."""
    rng = random.Random(seed)
    systems, chats = [words(rng, 150), words(rng, 90)], [[]]
    for _ in range(requests):
        if rng.random() < 0.5:
            chat = rng.choice(chats[-6:])
        else:
            chat = list(rng.choice(systems)) if rng.random() < 0.7 else []
            chats.append(chat)
        prompt = chat + words(rng, rng.randrange(20, 200))
        if len(prompt) > 700:
            chats.remove(chat)
            chats.append([])
            continue
        answer = asked(client, prompt, rng.choice((1, 8, 16, 24)), [len(prompt) - 12] if rng.random() < 0.5 else [])
        chat[:] = prompt + answer


def asked(client: Client, prompt: Prompt, tokens: int, boundaries: list[int]) -> Prompt:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    sampling["custom_params"] = {"cache_boundaries": boundaries}
    answer: Prompt = client.post("/generate", {"input_ids": prompt, "sampling_params": sampling})["output_ids"]
    return answer


@pytest.mark.parametrize(
    "server", [pytest.param(name, marks=[] if name == "extra_buffer" else pytest.mark.slow) for name in SERVERS]
)
def test_every_hit_is_the_same(
    server: str, serve: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> None:
    preset, policy, flags = SERVERS[server]
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    client = serve(preset, *flags, "--hybrid-policy", policy, "--hybrid-request-log", str(log))
    converse(client, 90, seed=5)
    client.server.stop()
    live, again = simulate(log), replay(log)
    assert again.differences == []
    assert (again.evictions > 50) is (policy != "lru"), "SGLang asks nobody whom to evict by its own order"
    assert sum(live.served) > 5000
    # A bound with elastic memory, where no log says when a pass saved what it did, and ages decide who leaves.
    if "elastic" in server:
        assert live.different <= len(live.served) // 30
    else:
        assert live.simulated == live.served
    other = simulate(log, "forecast" if policy == "lru" else "lru")
    assert other.served == live.served
    assert other.different > live.different, "the policy decides something"


ROOMY = {
    "extra_buffer": ("gdn", BUFFERED),
    "no_buffer": ("gdn", UNBUFFERED),
    "chunk_grid": ("mamba2", BUFFERED),
    "steps": ("mamba2", UNBUFFERED),
    "convolutions": ("conv", ()),
    "pages": ("gdn", (*BUFFERED, "--page-size", "64", "--mamba-track-interval", "64")),
}


@pytest.mark.slow
@pytest.mark.parametrize("server", ROOMY)
def test_simulate_foretells_the_hit_rate_of_a_server_with_room(
    server: str, serve: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> None:
    preset, flags = ROOMY[server]
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    client = serve(preset, *flags, "--hybrid-request-log", str(log))
    converse(client, 90, seed=7)
    client.server.stop()
    live, source = simulate(log), grid.Source(str(log))
    trace = source.load()
    assert trace.model is not None
    assert trace.saving is not None
    told, paper = (
        grid.run_cell(grid.cells([source], [trace.model], ["forecast"], [1], strategy=strategy)[0])
        for strategy in ("auto", "paper")
    )
    served = sum(live.served) / sum(live.prompts)
    assert abs(told.token_hit_rate - served) < 0.005
    if server in ("extra_buffer", "chunk_grid", "pages"):
        assert paper.token_hit_rate > served + 0.02, "which states that lie anywhere would hide"
