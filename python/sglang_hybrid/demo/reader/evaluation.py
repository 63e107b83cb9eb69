"""Accuracy by kind of question, on names and sentence forms that training never saw.

An answer counts where the greedy answer is the right one, token for token, its stop token included. One pass over a
conversation with the right answers in it shows that for all its turns: greedy decoding from the same prompt takes the
same first step that differs, or none.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sglang_hybrid.demo.reader import conversations, questions
from sglang_hybrid.demo.reader.conversations import Conversation
from sglang_hybrid.demo.reader.examples import encode
from sglang_hybrid.demo.reader.names import HELD

EVEN = dict.fromkeys(questions.ALL, 1.0) | {questions.TALK: 0.3}
COUNTED = tuple(kind for kind in questions.ALL if kind != questions.TALK)
"""Small talk is asked in passing."""

SEED = 20_261_123
TURNS = {256: 4, 512: 8, 2048: 20, 8192: 32}
"""Questions of one conversation, by its length in tokens; other lengths: one per 80 tokens, at most 32."""


def held_out(
    rng: random.Random, length: int, turns: int, form: str = HELD, documents: int | None = None
) -> Conversation:
    """A conversation whose documents and turns take about `length` tokens, with held-out names and forms of `form`."""
    share = max(0.3, 1 - 34 * turns / length)
    shape = conversations.shape_for(rng, length, share, 0.7, HELD, form, documents)
    return conversations.draw(rng, shape, turns, mix=EVEN)


def drawn(length: int, form: str, count: int, documents: int | None = None) -> Iterator[Conversation]:
    """Conversations of about `length` tokens, the same ones each time, until `count` questions of each kind are asked.

    A length that has no room for a kind ends too.
    """
    rng = random.Random(f"{SEED} {length} {form} {documents}")
    turns = TURNS.get(length, min(32, max(4, length // 80)))
    asked: dict[str, int] = dict.fromkeys(questions.ALL, 0)
    for _ in range(40 * count):
        if all(asked[kind] >= count for kind in COUNTED):
            break
        made = held_out(rng, length, turns, form, documents=documents)
        for turn in made.turns:
            asked[turn.kind] += 1
        yield made


@torch.no_grad()
def score(model: Any, made: Iterable[Conversation], device: str = "cpu") -> dict[str, list[int]]:
    """Right answers and questions by kind; `model` maps tokens [1, n] to logits."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for conversation in made:
        encoded = encode(conversation)
        ids = torch.tensor([encoded.ids], device=device)
        keep = torch.zeros_like(ids, dtype=torch.bool)
        for _, start, end in encoded.answers:
            keep[0, start - 1 : end - 1] = True
        hit = torch.zeros_like(ids, dtype=torch.bool)
        hit[keep] = model(ids, keep).argmax(-1) == ids.roll(-1, 1)[keep]
        for turn, start, end in encoded.answers:
            counts[turn.kind][0] += bool(hit[0, start - 1 : end - 1].all())
            counts[turn.kind][1] += 1
    return dict(counts)


def interval(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    share, square = right / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
