"""What a training reads when: longer rows, more documents and more filler as it goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass

PARTS = 2
"""Of a step's rows, each drawn from a seed of its own: one process or two see the same rows."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Until `until` of the training: lengths and how often, share of documents in a row, filler, tokens of a step."""

    until: float
    lengths: tuple[tuple[int, float], ...]
    share: tuple[float, float]
    filler: tuple[float, float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step: tokens in all, of a row, share of documents in it, sentences of filler per fact."""

    tokens: int
    length: int
    share: float
    filler: float


@dataclass(frozen=True, slots=True)
class Curriculum:
    """`cool_down`: share of the training in which the learning rate falls."""

    stages: tuple[Stage, ...]
    cool_down: float

    def at(self, progress: float, rng: random.Random) -> Drawn:
        stage = next(stage for stage in self.stages if progress < stage.until)
        lengths, weights = zip(*stage.lengths, strict=True)
        length = rng.choices(lengths, weights)[0]
        tokens = max(stage.tokens, PARTS * length)
        return Drawn(tokens, length, rng.uniform(*stage.share), rng.uniform(*stage.filler))

    def rate(self, progress: float) -> float:
        """What the learning rates are multiplied with."""
        if progress < WARM_UP:
            return progress / WARM_UP + 0.02
        return max(0.02, min(1.0, (1 - progress) / self.cool_down))


WARM_UP = 0.01
"""Share of the training in which the learning rate rises."""

FIRST = Curriculum(
    (
        Stage(0.10, ((128, 1.0),), (0.3, 0.4), (0.0, 0.0), 2048),
        Stage(0.40, ((128, 0.3), (256, 0.7)), (0.35, 0.5), (0.0, 0.4), 2048),
        Stage(0.70, ((256, 0.5), (512, 0.5)), (0.4, 0.6), (0.0, 0.8), 4096),
        Stage(0.88, ((256, 0.3), (512, 0.4), (1024, 0.3)), (0.4, 0.7), (0.1, 1.0), 6144),
        Stage(
            1.01,
            ((256, 0.15), (512, 0.3), (1024, 0.3), (2048, 0.17), (4096, 0.08)),
            (0.4, 0.75),
            (0.1, 1.0),
            8192,
        ),
    ),
    cool_down=0.3,
)
"""Of a training that begins with nothing."""

FURTHER = Curriculum(
    (
        Stage(
            0.5,
            ((256, 0.12), (512, 0.15), (1024, 0.25), (2048, 0.35), (4096, 0.11), (8192, 0.02)),
            (0.4, 0.75),
            (0.1, 1.0),
            4096,
        ),
        Stage(
            1.01,
            ((256, 0.05), (512, 0.12), (1024, 0.23), (2048, 0.35), (4096, 0.2), (8192, 0.05)),
            (0.4, 0.8),
            (0.1, 1.0),
            8192,
        ),
    ),
    cool_down=0.6,
)
"""Of a training that goes on from weights that read short rows."""

LONG = Curriculum(
    (
        Stage(
            1.01,
            ((512, 0.1), (1024, 0.1), (2048, 0.25), (4096, 0.3), (8192, 0.25)),
            (0.4, 0.85),
            (0.1, 1.0),
            8192,
        ),
    ),
    cool_down=0.8,
)
"""Of every training after that: rows as long as a prompt of eight documents with their filler."""

CURRICULA = (FIRST, FURTHER, LONG)
"""By how many trainings came before."""
