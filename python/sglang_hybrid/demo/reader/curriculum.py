"""What a training reads when: longer rows, more documents and more filler as it goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Until `until` of the training: lengths and how often, share of documents in a row, filler, tokens of a step."""

    until: float
    lengths: tuple[tuple[int, float], ...]
    share: tuple[float, float]
    filler: tuple[float, float]
    tokens: int


STAGES = (
    Stage(0.08, ((192, 1.0),), (0.3, 0.4), (0.0, 0.1), 2048),
    Stage(0.30, ((256, 1.0),), (0.35, 0.5), (0.0, 0.4), 2048),
    Stage(0.60, ((256, 0.3), (512, 0.7)), (0.4, 0.6), (0.1, 0.8), 3072),
    Stage(0.85, ((256, 0.1), (512, 0.5), (1024, 0.4)), (0.4, 0.7), (0.1, 1.0), 4096),
    Stage(
        1.01,
        ((256, 0.05), (512, 0.35), (1024, 0.35), (2048, 0.18), (4096, 0.05), (8192, 0.02)),
        (0.4, 0.75),
        (0.1, 1.0),
        4096,
    ),
)

WARM_UP, COOL_DOWN = 0.01, 0.25
"""Shares of the training in which the learning rate rises and falls."""


def at(progress: float, rng: random.Random) -> tuple[int, int, float, float]:
    """Tokens of a step, row length, share of documents, filler."""
    stage = next(stage for stage in STAGES if progress < stage.until)
    lengths, weights = zip(*stage.lengths, strict=True)
    return stage.tokens, rng.choices(lengths, weights)[0], rng.uniform(*stage.share), rng.uniform(*stage.filler)


def rate(progress: float) -> float:
    """What the learning rates are multiplied with."""
    if progress < WARM_UP:
        return progress / WARM_UP + 0.02
    return max(0.02, min(1.0, (1 - progress) / COOL_DOWN))
