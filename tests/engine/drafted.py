"""What the embedded reader's head drafts, by its definition, and how often a server then verifies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_hybrid.demo.reader import drafting, weights
from tests.engine.composition import Composition

STEPS = 3
"""Of a draft where nothing is said: a chain."""
TIE = 2e-4
"""Logits closer than this are equal to two float32 implementations."""


@torch.no_grad()
def verifications(judge: Composition, prompt: Sequence[int], output: Sequence[int], states: Tensor) -> set[int]:
    """Verifications in which `output` is said behind `prompt`; several numbers for ties.

    The head reads the `states` of both (`Composition.states`), each with the token behind it.
    """
    file = weights.head("reader-gdn")
    assert file is not None
    tokens = [*prompt, *output, *[0] * STEPS]
    embedded = F.embedding(torch.tensor([tokens]), judge.network.model.embed_tokens.weight)
    rows = end = len(prompt) + len(output)
    read = [embedded[:, 1 + step : 1 + step + rows] for step in range(STEPS)]
    logits = [F.linear(each[0], judge.head) for each in drafting.load(file)(states[None], read)]
    counts: dict[int, set[int]] = {said: {0} for said in range(end, end + STEPS + 1)}
    for said in range(end - 1, len(prompt), -1):  # tokens that are known, the last of them not yet read
        counts[said] = set()
        for step in range(STEPS + 1):
            right = wrong = True
            if step < STEPS:
                best, other = logits[step][said - 2].topk(2).values.tolist()
                margin = best - float(logits[step][said - 2][tokens[said + step]])
                right, wrong = margin < TIE, margin > 0 or best - other < TIE
            if wrong:
                counts[said] |= {1 + count for count in counts[said + step + 1]}
            if not right:
                break
    return counts[len(prompt) + 1]
