"""Choosing Marconi's alpha: the paper's bootstrap and replay, and a tuner of ours that needs no replay."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import BranchAndEnd
from sglang_hybrid.prefix.cache import Commit, PrefixCache
from sglang_hybrid.prefix.marconi import FlopAware, FlopAwareIndex
from sglang_hybrid.prefix.mark import Mark
from sglang_hybrid.prefix.snapshot import Snapshot, save
from sglang_hybrid.prefix.tokens import Tokens

ALPHAS: tuple[float, ...] = tuple(round(0.1 * step, 1) for step in range(11))
PUBLISHED_ALPHAS: tuple[float, ...] = tuple(round(0.1 * step, 1) for step in range(21))
NEIGHBOURS = 2  # alphas on either side whose hits count for an alpha: single replays vary with accidents of the log


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


def replay_hit_tokens(job: ReplayJob) -> int:
    """Input tokens hit when the logged requests run under `job.alpha` from the snapshot."""
    index = FlopAwareIndex(FlopAware(job.model, job.alpha))
    cache = PrefixCache(job.model, job.capacity_bytes, BranchAndEnd(), index)
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
    ) -> None:
        if multiplier < 1:
            raise ConfigError(
                f"the bootstrap window is 5-15 times the requests before the first eviction: {multiplier}"
            )
        if retunes < 0 or neighbours < 0:
            raise ConfigError(f"numbers of repetitions and neighbours cannot be negative: {retunes}, {neighbours}")
        if not alphas:
            raise ConfigError("name at least one alpha to choose from: ()")
        self._policy = FlopAware(model, 0.0)
        super().__init__(model, capacity_bytes, BranchAndEnd(), FlopAwareIndex(self._policy))
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
        return self._policy.alpha

    def commit(self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = ()) -> Commit:
        result = super().commit(tokens, n_input, now, boundaries)
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
        log = tuple(self._log)
        jobs = [ReplayJob(self.model, self.capacity_bytes, snapshot, log, alpha) for alpha in self._alphas]
        hits = list(self._grid_map(replay_hit_tokens, jobs))
        last = len(hits) - 1
        around = [
            fmean(hits[min(max(at + step, 0), last)] for step in range(-self._neighbours, self._neighbours + 1))
            for at in range(len(hits))
        ]
        self._policy.alpha = self._alphas[around.index(max(around))]
        if self._retunes:
            self._retunes -= 1
            self._window *= 2
            return
        self.tuned = True
        self._snapshot, self._log = None, []


class RegretTuner:
    """Follows alpha online without replay: blame for evictions that the ghost history shows were wrong.

    Two experts, recency and FLOP efficiency, as in LeCaR (Vietri et al. 2018). When a request would have restarted from
    an evicted checkpoint, each expert is blamed by how low it had scored that victim (normalised 0..1), less the longer
    the eviction is ago: `weight *= exp(-rate * (1 - score) * discount**evictions_since)`. `alpha` is the ratio of the
    weights. A fixed share of the weight is levelled out at every regret, so the tuner can always turn around.
    """

    RATE = 0.3
    SHARE = 0.01
    MAX_ALPHA = 8.0

    def __init__(self, policy: FlopAware, index: FlopAwareIndex, remembered: int = 4096) -> None:
        if remembered <= 0:
            raise ConfigError(f"regret needs at least one remembered eviction: {remembered}")
        self._policy = policy
        self._index = index
        self._remembered = remembered
        self._evictions = 0
        self._victims: OrderedDict[Mark, tuple[float, float, int]] = OrderedDict()
        self._recency = self._efficiency = 0.5
        self._policy.alpha = 1.0

    def evicted(self, mark: Mark) -> None:
        """`mark` lost its checkpoint; remember what either expert had said."""
        self._evictions += 1
        recency, efficiency = self._index.last_victim
        self._victims[mark] = (recency, efficiency, self._evictions)
        if len(self._victims) > self._remembered:
            self._victims.popitem(last=False)

    def missed(self, mark: Mark) -> None:
        """A request would have restarted from `mark` if it still had its checkpoint."""
        victim = self._victims.pop(mark, None)
        if victim is None:
            return
        recency, efficiency, at = victim
        fade = 0.005 ** ((self._evictions - at) / self._remembered)
        self._recency *= math.exp(-self.RATE * (1.0 - recency) * fade)
        self._efficiency *= math.exp(-self.RATE * (1.0 - efficiency) * fade)
        total = self._recency + self._efficiency
        self._recency = (1.0 - self.SHARE) * self._recency / total + self.SHARE / 2.0
        self._efficiency = 1.0 - self._recency
        self._policy.alpha = min(self.MAX_ALPHA, self._efficiency / self._recency)
