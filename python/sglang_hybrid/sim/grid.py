"""Policies x capacities x traces x models, one process per core; ceilings are rows like any policy."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.policies import DEFAULT
from sglang_hybrid.sim import saving, workloads
from sglang_hybrid.sim.bound import SpaceTimeBound
from sglang_hybrid.sim.cache import POOLS, open_cache, open_server
from sglang_hybrid.sim.ceilings import Clairvoyant, unbounded_hits
from sglang_hybrid.sim.latency import H100, CostModel
from sglang_hybrid.sim.metrics import Outcome, hit_columns, measure
from sglang_hybrid.sim.prefix_cache import PrefixCache
from sglang_hybrid.sim.readers import read_trace
from sglang_hybrid.sim.replay import Replay, check_capacity, replay
from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.saving import Saving
from sglang_hybrid.sim.segments.cache import Memory, SegmentCache
from sglang_hybrid.sim.segments.options import SUFFIX
from sglang_hybrid.sim.segments.play import ENDLESS, clairvoyant, columns, endless, play
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.trace import Trace

CEILINGS = ("clairvoyant", "bound", "unbounded")
_MOST_STATES = 40  # of one request: its declared boundaries, branch points and ends


@dataclass(frozen=True)
class Source:
    """Where a trace comes from: a path, or `workload:NAME?seed=1`; `format`, `skip_bad`, `tokenizer`: `read_trace`."""

    text: str
    format: str | None = None
    seed: int = 0
    skip_bad: bool = False
    tokenizer: Path | None = None

    def load(self) -> Trace:
        """The trace; raises TraceError."""
        if self.text.startswith(workloads.PREFIX):
            return workloads.parse(self.text, self.seed)
        return read_trace(self.text, self.format, skip_bad=self.skip_bad, tokenizer=self.tokenizer)


@dataclass(frozen=True)
class Cell:
    """One replay to do; `policy` is a name of POLICIES, one behind `pools:` (a server), one before `+segments` with the
    memory of `segments` taken from the capacity, or one of CEILINGS. `strategy`: one of `saving.STRATEGIES`."""

    source: Source
    model: ModelSpec
    policy: str
    capacity_bytes: int
    cost: CostModel = H100
    segments: Memory | None = None
    strategy: str = "auto"

    def saving(self, trace: Trace) -> Saving | None:
        """Where states are saved: as in the server of `trace`, else one of the model; None: as papers simulate it."""
        if self.strategy != "auto":
            return saving.of_model(self.model, self.strategy)
        if trace.saving is not None and self.model == trace.model:
            return trace.saving
        return saving.of_model(self.model) if trace.asked else None


def is_ceiling(policy: str) -> bool:
    """Whether the row of `policy` is one that policies are compared with."""
    return policy.removesuffix(SUFFIX) in CEILINGS


def has_room(cell: Cell, trace: Trace) -> bool:
    """Whether a cell of `trace` can be replayed: with segments, if it marks any and they fit into its capacity."""
    if not cell.policy.endswith(SUFFIX):
        return True
    fits = cell.segments is not None and cell.segments.total_bytes < cell.capacity_bytes
    return fits and any(request.segments for request in trace.requests)


def cells(
    sources: Iterable[Source],
    models: Iterable[ModelSpec],
    policies: Sequence[str],
    capacities_gb: Sequence[float],
    cost: CostModel = H100,
    segments: Memory | None = None,
    strategy: str = "auto",
) -> list[Cell]:
    """The full grid in the order of its tables; raises ConfigError for a capacity that is no positive number of GB."""
    budgets = [_bytes(gb) for gb in capacities_gb]
    if not policies or not budgets:
        raise ConfigError(f"a grid needs at least one policy and one capacity, got {len(policies)} x {len(budgets)}")
    models = list(models)
    return [
        Cell(s, m, p, b, cost, segments, strategy) for s in sources for m in models for b in budgets for p in policies
    ]


def run(grid: Sequence[Cell], jobs: int = 1) -> Iterator[tuple[int, Outcome]]:
    """Outcomes with the position of their cell, as they finish; `jobs` processes. Errors of a cell are raised."""
    if jobs < 1:
        raise ConfigError(f"at least one process is needed, got {jobs}")
    if jobs == 1 or len(grid) == 1:
        for i, cell in enumerate(grid):
            yield i, run_cell(cell)
        return
    with ProcessPoolExecutor(min(jobs, len(grid)), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run_cell, cell): i for i, cell in enumerate(grid)}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_cell(cell: Cell, timer: Callable[[], float] = time.perf_counter) -> Outcome:
    """Replay one cell in this process, decisions timed by `timer`; the last traces and their indices stay loaded."""
    trace = trace_of(cell.source)
    if cell.policy.endswith(SUFFIX):
        fields = _with_segments(cell, trace, timer)
    elif cell.policy in CEILINGS:
        fields = _ceiling(cell, trace)
    else:
        check_capacity(cell.capacity_bytes)
        cache = open_plain(cell, trace)
        result = replay(trace, cache, cell.capacity_bytes, timer)
        result.check()
        fields = measure(result, cell.model, index_of(cell.source).seen_tokens, cell.cost)
        fields |= _held(cell, result, cache.tree.states, cache.tree.kv_tokens)
    return Outcome(trace.name, cell.model.name, cell.policy, cell.capacity_bytes / 1e9, fields)


def open_plain(cell: Cell, trace: Trace) -> SimulatedServer | PrefixCache:
    """The cache of a cell without segments; raises ConfigError for a policy that does not exist."""
    if cell.policy.startswith(POOLS):
        return open_server(cell.policy.removeprefix(POOLS), cell.capacity_bytes, cell.model, cell.saving(trace))
    return open_cache(cell.policy, cell.capacity_bytes, cell.model, cell.saving(trace))


def open_segments(cell: Cell, trace: Trace) -> SegmentCache:
    """The cache of a cell with segments; raises ConfigError where its model or its memory has no room for them."""
    policy, memory, model = cell.policy.removesuffix(SUFFIX), cell.segments, cell.model
    assert memory is not None, "a cell with segments says how much memory they have"
    left = cell.capacity_bytes - memory.total_bytes
    if left <= 0:
        raise ConfigError(
            f"segments take their memory from the capacity; give more than --segments-gb {memory.total_bytes / 1e9:g} "
            f"to --capacity-gb: {cell.capacity_bytes / 1e9:g}"
        )
    if policy == "unbounded":
        return endless(trace, model, memory, DEFAULT, cell.saving(trace))
    if policy == "clairvoyant":
        return clairvoyant(trace, model, left, memory, DEFAULT, cell.saving(trace))
    return SegmentCache(model, left, memory, policy, saving=cell.saving(trace))


def _with_segments(cell: Cell, trace: Trace, timer: Callable[[], float]) -> dict[str, Any]:
    cache = open_segments(cell, trace)
    capacity = cell.capacity_bytes if cell.policy != f"unbounded{SUFFIX}" else 2 * ENDLESS
    result, served = play(trace, cache, capacity, timer)
    result.check()
    return columns(result, served, cache, index_of(cell.source).seen_tokens, cell.cost)


def _held(cell: Cell, result: Replay, states: int, kv_tokens: int) -> dict[str, Any]:
    """Columns of what the cache evicted, and of `states` and `kv_tokens`, which it held at the end."""
    model = cell.model
    longest = max(len(r.tokens) for r in result.trace.requests)
    whole = model.bytes_for(longest, _MOST_STATES) <= cell.capacity_bytes  # else parts are left out, not evicted
    return {
        "evictions": result.evictions,
        "all_fits": result.evictions == 0 and whole,
        "states": states,
        "states_gb": round(states * model.checkpoint_bytes / 1e9, 4),
        "kv_gb": round(kv_tokens * model.kv_bytes_per_token / 1e9, 4),
    }


def _ceiling(cell: Cell, trace: Trace) -> dict[str, Any]:
    index = index_of(cell.source)
    if cell.policy == "bound":
        tokens = _bound(cell.source, cell.model).tokens(cell.capacity_bytes)
        return {
            "requests": len(trace),
            "input_tokens": trace.n_input_tokens,
            "hit_tokens": math.floor(tokens),
            "token_hit_rate": round(tokens / trace.n_input_tokens, 6),
        }
    exact = cell.policy == "unbounded"
    hits = unbounded_hits(index) if exact else Clairvoyant(index, cell.capacity_bytes, cell.model).hits()
    return hit_columns(index.n_input, hits, cell.model, cell.cost)


@lru_cache(maxsize=2)
def trace_of(source: Source) -> Trace:
    """The trace of `source`, which stays loaded until two others were asked for, or `forget`."""
    return source.load()


@lru_cache(maxsize=2)
def index_of(source: Source) -> ReuseIndex:
    """Its tree, which stays as well."""
    return ReuseIndex(trace_of(source))


@lru_cache(maxsize=4)
def _bound(source: Source, model: ModelSpec) -> SpaceTimeBound:
    return SpaceTimeBound(index_of(source), model)


def forget() -> None:
    """Drop what stays loaded."""
    for kept in (trace_of, index_of, _bound):
        kept.cache_clear()


def _bytes(gb: float) -> int:
    if not math.isfinite(gb) or gb <= 0:
        raise ConfigError(f"a capacity is a positive number of GB, got {gb}")
    return round(gb * 1e9)
