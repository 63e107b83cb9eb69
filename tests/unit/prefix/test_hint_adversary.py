"""A tenant whose hints are lies, or a trap: what it can take from another one that shares the server."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

MODEL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
SHAPE = Shape(states=48, kv_tokens=24_576)
ROUNDS, CHATS = 500, 24
SOON, DAY = Hints(back_in_s=1.0), Hints(lifetime_s=86_400.0)


def victims_hits(attack: str, seed: int) -> float:
    """Share of the victim's prompt tokens that came from the cache.

    It holds `CHATS` conversations of six turns, one turn a second. Between two of them the other tenant sends two
    prompts that never come again, with a hint that says they will; before a `trap` it tells the truth for a while.
    """
    server, rng = SimulatedServer(MODEL, SHAPE), np.random.default_rng(seed)
    words = lambda count: rng.integers(0, 30_000, count).astype(np.int32)  # noqa: E731

    def serve(prompt: Tokens, now: float, tenant: str, hints: Hints) -> tuple[int, Tokens]:
        cached = server.arrive("r", prompt, now, tenant, hints=hints)
        server.decode("r", 32, now)
        said = np.concatenate([prompt, words(32)]).astype(np.int32)
        server.finish("r", said, now)
        return cached, said

    chats: list[Tokens] = [words(0) for _ in range(CHATS)]
    turns, hit, asked, true = [0] * CHATS, 0, 0, words(200)
    for at in range(ROUNDS):
        chosen = int(rng.integers(CHATS))
        if turns[chosen] == 6:
            turns[chosen], chats[chosen] = 0, words(0)
        prompt = np.concatenate([chats[chosen], words(160)]).astype(np.int32)
        cached, chats[chosen] = serve(prompt, float(at), "victim", NO_HINTS)
        turns[chosen] += 1
        if at > ROUNDS // 4:
            hit, asked = hit + cached, asked + prompt.size
        if attack == "trap" and at < ROUNDS // 4:
            _, true = serve(np.concatenate([true, words(16)]).astype(np.int32), at + 0.3, "other", SOON)
            true = words(200) if true.size > 4_000 else true
            continue
        for later in (0.3, 0.6):
            said = {"silent": NO_HINTS, "soon": SOON, "trap": SOON, "day": DAY}[attack]
            serve(words(300), at + later, "other", said)
    server.check()
    return hit / asked


@pytest.mark.parametrize("attack", ["soon", "day", "trap"])
def test_a_liar_takes_nothing_from_another_tenant(attack: str) -> None:
    lost = [victims_hits("silent", seed) - victims_hits(attack, seed) for seed in range(2)]
    assert sum(lost) / len(lost) < 0.02
    assert max(lost) < 0.05
