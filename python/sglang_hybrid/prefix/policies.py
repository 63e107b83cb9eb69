"""The registry of policies: one name, one meaning, in the server, the simulator, the request log and the benchmarks.

To add one, write its admission (`admission.AdmissionPolicy`) or its order of eviction (`candidates.VictimIndex`) as a
class, and name the pair in POLICIES.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import AdmissionPolicy, EveryChunk, EveryN, HistoryAdmission, MarconiAdmission
from sglang_hybrid.prefix.eviction.candidates import VictimIndex
from sglang_hybrid.prefix.eviction.forecast import Forecast, ForecastIndex
from sglang_hybrid.prefix.eviction.gdsf import Gdsf
from sglang_hybrid.prefix.eviction.lru import RecencyQueues
from sglang_hybrid.prefix.eviction.marconi import FlopAware, FlopAwareIndex
from sglang_hybrid.prefix.reuse.table import ReuseTable


class Pricing(NamedTuple):
    """What an eviction order of one pool is made from.

    `model` prices bytes of that pool alone, `table` has the learned odds of reuse, `flop_aware` is Marconi's score with
    the weight that all pools of a cache share.
    """

    model: ModelSpec
    table: ReuseTable
    flop_aware: FlopAware


class Policy(NamedTuple):
    """How a cache decides.

    `stock`: in a server SGLang decides by itself, and the classes here model that. `served`: servers take it.
    `guarded`: never far behind LRU (`guard`). `tuner`: what sets the weight of Marconi's score, 'regret' (online) or
    'bootstrap' (the paper's replay, in the simulator); '' leaves it at `alpha`.
    """

    summary: str
    admission: Callable[[], AdmissionPolicy]
    eviction: Callable[[Pricing], VictimIndex]
    served: bool = False
    stock: bool = False
    guarded: bool = False
    tuner: str = ""
    alpha: float = 0.0


def _forecast(pricing: Pricing) -> VictimIndex:
    return ForecastIndex(Forecast(pricing.model, pricing.table))


def _flop_aware(pricing: Pricing) -> VictimIndex:
    return FlopAwareIndex(pricing.flop_aware)


def _lru(pricing: Pricing) -> VictimIndex:
    return RecencyQueues()


def _superseded_first(pricing: Pricing) -> VictimIndex:
    return RecencyQueues(superseded_first=True)


def _gdsf(pricing: Pricing) -> VictimIndex:
    return Gdsf(pricing.model)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "forecast": Policy(
            "odds of reuse x FLOPs per byte, both learned online; never far behind LRU",
            HistoryAdmission, _forecast, served=True, guarded=True,
        ),
        "forecast-unguarded": Policy("forecast without its bound against LRU", HistoryAdmission, _forecast),
        "recency": Policy("the checkpoints of forecast, evicted by LRU", HistoryAdmission, _lru, served=True),
        "lru": Policy("what SGLang does: branch point and end, LRU", MarconiAdmission, _lru, served=True, stock=True),
        "superseded": Policy(
            "lru, but a state whose continuation is saved goes first", MarconiAdmission, _superseded_first
        ),
        "marconi": Policy(
            "Marconi, its weight tuned by replays that are repeated as the log grows",
            MarconiAdmission, _flop_aware, tuner="bootstrap",
        ),
        "marconi-paper": Policy(
            "Marconi, its weight tuned once, as published", MarconiAdmission, _flop_aware, tuner="bootstrap"
        ),
        "marconi-online": Policy(
            "Marconi, its weight tuned by the regret of past evictions; never far behind LRU",
            MarconiAdmission, _flop_aware, served=True, guarded=True, tuner="regret",
        ),
        "gdsf": Policy("GreedyDual-Size-Frequency over FLOPs and bytes", MarconiAdmission, _gdsf),
        "vllm+": Policy("a state every 32 tokens, LRU", EveryN, _lru),
        "sglang-chunks": Policy("a state at the end of every chunk, LRU", EveryChunk, _lru),
    }
)  # fmt: skip

DEFAULT = "forecast"
FIXED = "marconi:"
"""`marconi:0.5` is Marconi with a fixed weight of FLOP efficiency, in servers too."""


def find(name: str) -> Policy:
    """The policy called `name`, an entry of POLICIES or `marconi:ALPHA`; raises ConfigError for others."""
    if name.startswith(FIXED):
        try:
            alpha = float(name.removeprefix(FIXED))
        except ValueError:
            raise ConfigError(f"write a fixed weight as marconi:0.5: {name!r}") from None
        if not 0.0 <= alpha < float("inf"):
            raise ConfigError(f"the weight of FLOP efficiency is 0 or more, as in marconi:0.5: {name!r}")
        return Policy("Marconi with a fixed weight", MarconiAdmission, _flop_aware, served=True, alpha=alpha)
    if name not in POLICIES:
        raise ConfigError(f"unknown policy, choose one of {', '.join(POLICIES)} or marconi:ALPHA: {name!r}")
    return POLICIES[name]


def served() -> tuple[str, ...]:
    """Names that a server takes, beside `marconi:ALPHA`."""
    return tuple(name for name, policy in POLICIES.items() if policy.served)
