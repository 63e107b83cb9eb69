"""What the generators draw: lengths, gaps and token ids, all from one seeded numpy generator."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.sim.trace import Tokens

VOCAB = 32_000
FIRST_TEXT_ID = 200  # below: BOS and the fixed ids of message headers
CONTEXT_TOKENS = 32_768  # Marconi's traces stop here
WORDS_PER_TOKEN = 0.75
WORDS_PER_S = 1.5  # 90 words a minute
WRAPPER_TOKENS = 8  # of the JSON around a message, behind its header; nobody types them

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """A lognormal number of tokens: `median`, shape `sigma`, clipped to least..most."""

    median: float
    sigma: float
    least: int = 1
    most: int = CONTEXT_TOKENS

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """int64 of shape (n,)."""
        values = np.exp(rng.normal(np.log(self.median), self.sigma, n))
        return np.clip(np.rint(values), self.least, self.most).astype(np.int64)


def text(rng: np.random.Generator, n: int) -> Tokens:
    """`n` ids of text, uniform over the vocabulary: two texts part at their first id, nearly always."""
    return rng.integers(FIRST_TEXT_ID, VOCAB, n, dtype=np.int32)


def turns(rng: np.random.Generator, sessions: int, least: int, mean: float, most: int) -> Ints:
    """Turns per session: `least` plus a geometric tail with the given mean of the whole, at most `most`."""
    tail = rng.geometric(1.0 / (mean - least + 1.0), sessions) - 1
    return np.minimum(least + tail, most).astype(np.int64)


def typing_gaps(rng: np.random.Generator, typed_tokens: Ints, gap_sigma: float) -> Floats:
    """Seconds before each turn: the time to type it; the first is 0. `gap_sigma` > 0 makes the gaps heavy-tailed."""
    gaps = typed_tokens.astype(np.float64) * (WORDS_PER_TOKEN / WORDS_PER_S)
    return _first_at_once(rng, gaps, gap_sigma)


def tool_gaps(rng: np.random.Generator, n: int, art: float, gap_sigma: float) -> Floats:
    """Seconds before each agent step: Poisson with mean `art`; the first is 0."""
    return _first_at_once(rng, rng.poisson(art, n).astype(np.float64), gap_sigma)


def arrivals(rng: np.random.Generator, n: int, rate: float) -> Floats:
    """Times of a Poisson process with `rate` requests a second."""
    return np.cumsum(rng.exponential(1.0 / rate, n))


def zipf_choice(rng: np.random.Generator, kinds: int, exponent: float, n: int) -> Ints:
    """`n` draws of 0..kinds-1 with the chances of `zipf`."""
    return rng.choice(kinds, n, p=zipf(kinds, exponent)).astype(np.int64)


def zipf(kinds: int, exponent: float) -> Floats:
    """Chances proportional to 1 / (rank ** exponent), shape (kinds,)."""
    weights = 1.0 / np.arange(1, kinds + 1) ** exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _first_at_once(rng: np.random.Generator, gaps: Floats, gap_sigma: float) -> Floats:
    if gap_sigma > 0:
        gaps = gaps * np.exp(rng.normal(0.0, gap_sigma, len(gaps)))
    gaps[:1] = 0.0
    return gaps
