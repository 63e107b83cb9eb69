"""Prompts of random tokens, the same in every run."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.prefix.tree.tokens import Tokens


def text(seed: int, n: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 30_000, n).astype(np.int32)
