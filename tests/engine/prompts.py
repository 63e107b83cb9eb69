"""Prompts in the vocabulary of the demo model, and the servers' flags that their lengths are about."""

from __future__ import annotations

import random

from tests.engine.support import Prompt

GRID = 64
CHUNK = 128
FIRST, LAST = 3, 258  # the byte tokens of the demo vocabulary

STRATEGIES = {
    "extra_buffer": ("--chunked-prefill-size", str(CHUNK)),
    "no_buffer": ("--mamba-radix-cache-strategy", "no_buffer", "--chunked-prefill-size", str(CHUNK)),
}
OVERLAP = ("--chunked-prefill-size", str(CHUNK), "--hybrid-cpu-event-loop", "overlap")
"""The event loop that GPUs run by default: a pass is scheduled before the answers of the one before are known."""

HEAD = ("--speculative-algorithm", "NEXTN")
TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", "8")
"""The model's own head drafts: by itself chains of three, or trees."""


def words(rng: random.Random, count: int) -> Prompt:
    return [rng.randint(FIRST, LAST) for _ in range(count)]


def prompts(seed: int, count: int) -> list[Prompt]:
    """Random prompts: lengths around every grid and chunk boundary, a third of them continuing or branching off
    an earlier one."""
    rng = random.Random(seed)
    edges = [edge + off for edge in (GRID, CHUNK, 2 * CHUNK, 3 * CHUNK, 512) for off in (-2, -1, 0, 1, 2)]
    made: list[Prompt] = []
    for i in range(count):
        length = rng.choice(edges) if i % 2 else rng.randint(1, 600)
        prompt = words(rng, length)
        if made and rng.random() < 0.6:
            base = rng.choice(made)
            cut = rng.choice([len(base), rng.randint(1, len(base)), len(base) // GRID * GRID or 1])
            prompt = base[:cut] + words(rng, rng.randint(1, 150))
        made.append(prompt)
    return made
