"""What a past phase used often must not stay beside what the present one needs."""

import pytest

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.workloads import generate

MODEL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
SHAPE = {
    "sessions": 24, "turns": 3, "documents": 3, "questions": 3, "system_tokens": 128, "message_tokens": 40,
    "output_tokens": 8, "document_tokens": 3000, "rate": 3.0,
}  # fmt: skip


def computed(policy: str, seed: int, capacity_bytes: int) -> int:
    """Prompt tokens of the second conversations that are not skipped."""
    cache, tokens = open_cache(policy, capacity_bytes, MODEL), 0
    for r in generate("turnover", seed, cycles=1, **SHAPE).requests:
        hit = cache.lookup(r.input_tokens, r.ts)
        cache.commit(r.tokens, r.n_input, r.ts)
        if r.session.startswith("chat 2"):
            tokens += r.n_input - hit
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_documents_that_nobody_asks_for_any_more_make_room_for_conversations(seed: int) -> None:
    assert computed("forecast", seed, 6_000_000) <= 1.05 * computed("lru", seed, 6_000_000)
