"""The three workloads of the AVMP evaluation and a ShareGPT-like replay, draw for draw.

One tick is one token of prompt or generation, so a request lives for prompt + gen ticks (AVMP 4.1, and its released
generator: same distributions, same order of draws, hence the same traces for the same seed). The released replay
draws prompt lengths from 5,000 ShareGPT prompts; `SHAREGPT_QUANTILES` is their quantile function.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.errors import ConfigError

IntArray = NDArray[np.int64]

# (per cent, prompt tokens) of the 5,000 first human turns of ShareGPT-Vicuna in the AVMP release; AVMP 4.4 prints the
# median (25), p95 (810) and maximum (6,708).
SHAREGPT_QUANTILES = (
    (0, 1),
    (5, 3),
    (10, 6),
    (15, 8),
    (20, 10),
    (25, 12),
    (30, 13),
    (35, 16),
    (40, 18),
    (45, 21),
    (50, 25),
    (55, 29),
    (60, 35),
    (65, 44),
    (70, 60),
    (75, 79),
    (80, 113),
    (85, 177),
    (90, 344),
    (92, 448),
    (94, 633),
    (95, 810),
    (96, 945),
    (97, 1156),
    (98, 1461),
    (99, 2124),
    (99.5, 2674),
    (100, 6708),
)


class Request(NamedTuple):
    """One request of a trace; lengths in tokens, times in ticks."""

    request_id: int
    prompt: int
    gen: int
    arrival: int

    @property
    def departure(self) -> int:
        """Tick at which the request ends if it starts when it arrives."""
        return self.arrival + self.prompt + self.gen


Lengths = tuple[IntArray, IntArray, IntArray]  # prompt tokens, generated tokens, arrival ticks; one entry per request


def _uniform_short(rng: np.random.Generator, count: int, prompts: IntArray) -> Lengths:
    prompt = rng.integers(128, 1025, size=count)
    return prompt, rng.integers(64, 257, size=count), np.arange(count)


def _mixed_long(rng: np.random.Generator, count: int, prompts: IntArray) -> Lengths:
    is_long = rng.random(size=count) < 0.2
    short = rng.integers(512, 4097, size=count)
    long = rng.integers(16384, 65537, size=count)
    return np.where(is_long, long, short), rng.integers(128, 513, size=count), np.arange(count)


def _agentic_burst(rng: np.random.Generator, count: int, prompts: IntArray) -> Lengths:
    arrival = np.ceil(np.cumsum(rng.exponential(scale=0.1, size=count))).astype(np.int64)
    prompt = np.clip(rng.lognormal(mean=8.5, sigma=1.0, size=count).astype(np.int64), 64, 65536)
    return prompt, rng.integers(64, 257, size=count), arrival


def _sharegpt(rng: np.random.Generator, count: int, prompts: IntArray) -> Lengths:
    prompt = np.clip(rng.choice(prompts, size=count, replace=True), 16, 4096)
    gen = np.clip(rng.lognormal(mean=4.5, sigma=1.0, size=count).astype(np.int64), 32, 2048)
    return prompt, gen, np.arange(count)


class Workload(NamedTuple):
    """A recipe: how many requests, the first seed of its replicates, and the draw."""

    requests: int
    base_seed: int
    draw: Callable[[np.random.Generator, int, IntArray], Lengths]


WORKLOADS = {
    "uniform_short": Workload(512, 1, _uniform_short),
    "mixed_long": Workload(256, 2, _mixed_long),
    "agentic_burst": Workload(256, 3, _agentic_burst),
    "sharegpt": Workload(512, 4, _sharegpt),
}


def sharegpt_prompts(count: int = 5000) -> IntArray:
    """`count` prompt lengths (int64) at even quantiles of ShareGPT's first turns, geometric between knots."""
    percent, tokens = np.array(SHAREGPT_QUANTILES, dtype=np.float64).T
    at = (np.arange(count) + 0.5) * 100.0 / count
    lengths: IntArray = np.rint(np.exp(np.interp(at, percent, np.log(tokens)))).astype(np.int64)
    return lengths


def generate(name: str, replicate: int, prompts: IntArray | None = None) -> list[Request]:
    """The trace of `name` for replicate 0, 1, 2, ... (seed = the workload's base seed + replicate).

    `prompts` replaces the ShareGPT-like prompt lengths. Raises ConfigError for an unknown name.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"choose a workload among {sorted(WORKLOADS)}: {name!r}")
    workload = WORKLOADS[name]
    rng = np.random.default_rng(workload.base_seed + replicate)
    drawn = workload.draw(rng, workload.requests, sharegpt_prompts() if prompts is None else prompts)
    columns = zip(*(column.tolist() for column in drawn), strict=True)
    return [Request(index, prompt, gen, arrival) for index, (prompt, gen, arrival) in enumerate(columns)]
