"""Caches by policy name: the registry the simulator, the tuner and the benchmarks open caches from."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec, preset
from sglang_hybrid.prefix.admission import AllChunks, BranchAndEnd, EveryN, Judicious
from sglang_hybrid.prefix.cache import PrefixCache
from sglang_hybrid.prefix.classes import PRIORS
from sglang_hybrid.prefix.forecast import Forecast, ForecastIndex
from sglang_hybrid.prefix.gdsf import Gdsf
from sglang_hybrid.prefix.guard import Guard
from sglang_hybrid.prefix.history import History
from sglang_hybrid.prefix.lru import RecencyQueues
from sglang_hybrid.prefix.marconi import FlopAware, FlopAwareIndex
from sglang_hybrid.prefix.reuse import ReuseTable
from sglang_hybrid.prefix.tuner import PUBLISHED_ALPHAS, MarconiCache, RegretTuner


def _lru(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    return PrefixCache(model, capacity_bytes, BranchAndEnd(), RecencyQueues())


def _recency(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    history = History(ReuseTable(PRIORS), context_tokens=model.context_tokens)
    return PrefixCache(model, capacity_bytes, Judicious(), RecencyQueues(), history)


def _superseded(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    return PrefixCache(model, capacity_bytes, BranchAndEnd(), RecencyQueues(superseded_first=True))


def _vllm(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    return PrefixCache(model, capacity_bytes, EveryN(32), RecencyQueues())


def _chunks(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    return PrefixCache(model, capacity_bytes, AllChunks(), RecencyQueues())


def _gdsf(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    return PrefixCache(model, capacity_bytes, BranchAndEnd(), Gdsf(model))


def _marconi(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    return MarconiCache(model, capacity_bytes)


def _marconi_paper(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    return MarconiCache(model, capacity_bytes, retunes=0, neighbours=0, alphas=PUBLISHED_ALPHAS)


def _marconi_static(model: ModelSpec, capacity_bytes: int, alpha: float) -> PrefixCache:
    return PrefixCache(model, capacity_bytes, BranchAndEnd(), FlopAwareIndex(FlopAware(model, alpha)))


def _marconi_regret(model: ModelSpec, capacity_bytes: int) -> PrefixCache:
    policy = FlopAware(model)
    index = FlopAwareIndex(policy)
    history = History(ReuseTable(PRIORS), context_tokens=model.context_tokens)
    feedback = RegretTuner(policy, index)
    return PrefixCache(model, capacity_bytes, BranchAndEnd(), index, history, feedback=feedback, guard=_guard(model))


def _forecast(model: ModelSpec, capacity_bytes: int, guarded: bool = True) -> PrefixCache:
    table = ReuseTable(PRIORS)
    index = ForecastIndex(Forecast(model, table))
    history = History(table, context_tokens=model.context_tokens)
    guard = _guard(model) if guarded else None
    return PrefixCache(model, capacity_bytes, Judicious(), index, history, bypass=True, guard=guard)


def _guard(model: ModelSpec) -> Guard:
    return Guard(model.kv_bytes_per_token, model.checkpoint_bytes)


POLICIES: MappingProxyType[str, Callable[[ModelSpec, int], PrefixCache]] = MappingProxyType(
    {
        "lru": _lru,
        "recency": _recency,
        "superseded": _superseded,
        "vllm+": _vllm,
        "sglang-chunks": _chunks,
        "gdsf": _gdsf,
        "marconi": _marconi,
        "marconi-paper": _marconi_paper,
        "marconi-regret": _marconi_regret,
        "forecast-unguarded": partial(_forecast, guarded=False),
        "forecast": _forecast,
    }
)


def open_cache(policy: str, capacity_bytes: int, model: ModelSpec | str) -> PrefixCache:
    """A cache of `capacity_bytes` for `model` (spec or preset name) under `policy`, a name in POLICIES.

    `marconi:ALPHA` fixes Marconi's alpha instead of tuning it. Raises ConfigError for unknown names.
    """
    spec = preset(model) if isinstance(model, str) else model
    name, _, argument = policy.partition(":")
    if name == "marconi" and argument:
        try:
            alpha = float(argument)
        except ValueError:
            raise ConfigError(f"write a fixed alpha as marconi:0.5: {policy!r}") from None
        return _marconi_static(spec, capacity_bytes, alpha)
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy, choose one of {', '.join(POLICIES)}: {policy!r}")
    return POLICIES[policy](spec, capacity_bytes)
