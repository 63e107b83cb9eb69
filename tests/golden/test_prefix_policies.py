"""Hit tokens of every policy on one small seeded trace, to the token.

A change here is a change of decisions: say in the commit why the new figure is right.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.sim.cache import open_cache

MODEL = ModelSpec(
    "small", kv_bytes_per_token=64, checkpoint_bytes=25_600, flops_per_token=1e6, flops_per_token_pair=1e2
)
CAPACITY_BYTES = 1_500_000
INPUT_TOKENS = 442_624
GOLDEN = {
    "lru": 229_980,
    "recency": 231_140,
    "superseded": 248_637,
    "vllm+": 57_074,
    "sglang-chunks": 179_207,
    "gdsf": 236_279,
    "marconi": 225_963,
    "marconi-paper": 221_004,
    "marconi-online": 237_758,
    "forecast-unguarded": 284_372,
    "forecast": 284_372,
    "marconi:0": 230_686,
    "marconi:1": 230_798,
}


def trace() -> Iterator[tuple[Tokens, int, float]]:
    """40 conversations behind 4 shared prompts: (tokens, input length, time), in order of time."""
    rng = np.random.default_rng(20)
    prompts = [rng.integers(0, 32_000, n).astype(np.int32) for n in (120, 200, 300, 400)]
    requests = []
    for session in range(40):
        tokens, clock = prompts[int(rng.integers(4))], 2.0 * session
        for _ in range(int(rng.integers(4, 16))):
            asked = np.concatenate((tokens, rng.integers(0, 32_000, int(rng.integers(10, 150))).astype(np.int32)))
            tokens = np.concatenate((asked, rng.integers(0, 32_000, int(rng.integers(10, 200))).astype(np.int32)))
            requests.append((tokens, int(asked.size), clock))
            clock += float(rng.gamma(2.0, 4.0))
    yield from sorted(requests, key=lambda request: request[2])


@pytest.mark.parametrize("policy", [*POLICIES, "marconi:0", "marconi:1"])
def test_hit_tokens(policy: str) -> None:
    cache = open_cache(policy, CAPACITY_BYTES, MODEL)
    hit_tokens = input_tokens = 0
    for tokens, n_input, now in trace():
        hit_tokens += cache.lookup(tokens[:n_input], now)
        input_tokens += n_input
        cache.commit(tokens, n_input, now)
    cache.check()
    assert input_tokens == INPUT_TOKENS
    assert hit_tokens == GOLDEN[policy]
