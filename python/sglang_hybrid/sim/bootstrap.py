"""Choosing Marconi's alpha by the paper's bootstrap and replay."""

from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.policies import FIXED
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.sim.prefix_cache import Commit, PrefixCache
from sglang_hybrid.sim.saving import Saving
from sglang_hybrid.sim.snapshot import Snapshot, save

ALPHAS: tuple[float, ...] = tuple(round(0.1 * step, 1) for step in range(11))
PUBLISHED_ALPHAS: tuple[float, ...] = tuple(round(0.1 * step, 1) for step in range(21))
NEIGHBOURS = 2  # alphas on either side whose hits count for an alpha: single replays vary with accidents of the log
PAPER: dict[str, Any] = {"retunes": 0, "neighbours": 0, "alphas": PUBLISHED_ALPHAS}
"""The tuner as published: it tunes once, over the published grid."""


class LoggedRequest(NamedTuple):
    """A request of the bootstrap window: tokens, input length, seconds."""

    tokens: Tokens
    n_input: int
    now: float


class ReplayJob(NamedTuple):
    """One point of the grid: everything a worker process needs."""

    model: ModelSpec
    capacity_bytes: int
    snapshot: Snapshot
    requests: tuple[LoggedRequest, ...]
    alpha: float
    saving: Saving | None = None


def replay_hit_tokens(job: ReplayJob) -> int:
    """Input tokens hit when the logged requests run under `job.alpha` from the snapshot."""
    cache = PrefixCache(job.model, job.capacity_bytes, f"{FIXED}{job.alpha}", job.saving)
    cache.load(job.snapshot)
    hit_tokens = 0
    for request in job.requests:
        hit_tokens += cache.lookup(request.tokens[: request.n_input], request.now)
        cache.commit(request.tokens, request.n_input, request.now)
    return hit_tokens


GridMap = Callable[[Callable[[ReplayJob], int], Iterable[ReplayJob]], Iterator[int]]


class MarconiCache(PrefixCache):
    """Marconi with its own tuner (section 4.2, "managing the balance").

    Alpha is 0 until the first eviction; there the tree is saved and `multiplier` (5-15) times the requests seen so far
    are logged; then every alpha of the grid replays the log from the saved tree, and the one with the highest token hit
    rate, averaged over its neighbours in the grid, is used (the lowest among equals). `grid_map` runs the replays:
    `map`, or `ProcessPoolExecutor.map` for the paper's parallel search.

    This is a stronger baseline than the paper's tuner, which tunes once: it tunes `retunes` times more, each time the
    log has doubled, as a first window is often too short to choose well; and its grid ends at 1. Above that the most
    efficient entry outlives any recent one for good: short logs do not show how such entries fill the cache in time,
    and chose such weights to their loss. `retunes=0`, `neighbours=0` and `alphas=PUBLISHED_ALPHAS` give the paper's
    tuner with the published grid.
    """

    def __init__(
        self,
        model: ModelSpec,
        capacity_bytes: int,
        multiplier: int = 5,
        grid_map: GridMap = map,
        retunes: int = 3,
        neighbours: int = NEIGHBOURS,
        alphas: tuple[float, ...] = ALPHAS,
        saving: Saving | None = None,
    ) -> None:
        if multiplier < 1:
            raise ConfigError(
                f"the bootstrap window is 5-15 times the requests before the first eviction: {multiplier}"
            )
        if retunes < 0 or neighbours < 0:
            raise ConfigError(f"numbers of repetitions and neighbours cannot be negative: {retunes}, {neighbours}")
        if not alphas:
            raise ConfigError("name at least one alpha to choose from: ()")
        super().__init__(model, capacity_bytes, f"{FIXED}0", saving)
        self._retunes = retunes
        self._neighbours = neighbours
        self._alphas = alphas
        self._multiplier = multiplier
        self._grid_map = grid_map
        self._requests = 0
        self._snapshot: Snapshot | None = None
        self._log: list[LoggedRequest] = []
        self._window = 0
        self.tuned = False

    @property
    def alpha(self) -> float:
        """The weight of FLOP efficiency in use."""
        return self.decisions.flop_aware.alpha

    def commit(
        self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = (), hints: Hints = NO_HINTS
    ) -> Commit:
        result = super().commit(tokens, n_input, now, boundaries, hints)
        if self.tuned:
            return result
        self._requests += 1
        if self._snapshot is not None:
            self._log.append(LoggedRequest(tokens, n_input, now))
            if len(self._log) >= self._window:
                self._tune(self._snapshot)
        elif result.evicted:
            self._snapshot = save(self.tree)
            self._window = self._multiplier * self._requests
        return result

    def _tune(self, snapshot: Snapshot) -> None:
        log, rest = tuple(self._log), (self.model, self.capacity_bytes, snapshot)
        jobs = [ReplayJob(*rest, log, alpha, self.saving) for alpha in self._alphas]
        hits = list(self._grid_map(replay_hit_tokens, jobs))
        last = len(hits) - 1
        around = [
            fmean(hits[min(max(at + step, 0), last)] for step in range(-self._neighbours, self._neighbours + 1))
            for at in range(len(hits))
        ]
        self.decisions.flop_aware.alpha = self._alphas[around.index(max(around))]
        if self._retunes:
            self._retunes -= 1
            self._window *= 2
            return
        self.tuned = True
        self._snapshot, self._log = None, []
