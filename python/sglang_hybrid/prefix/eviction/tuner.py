"""Marconi's weight of FLOP efficiency, followed online."""

import math
from collections import OrderedDict

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.eviction.marconi import FlopAware
from sglang_hybrid.prefix.tree.mark import Mark


class RegretTuner:
    """Follows alpha online without replay: blame for evictions that the ghost history shows were wrong.

    Two experts, recency and FLOP efficiency, as in LeCaR (Vietri et al. 2018). When a request would have resumed from
    an evicted checkpoint, each expert is blamed by how low it had scored that victim (normalised 0..1), less the longer
    the eviction is ago: `weight *= exp(-rate * (1 - score) * discount**evictions_since)`. `alpha` is the ratio of the
    weights. A fixed share of the weight is levelled out at every regret, so the tuner can always turn around.
    """

    RATE = 0.3
    SHARE = 0.01
    MAX_ALPHA = 8.0

    def __init__(self, policy: FlopAware, remembered: int = 4096) -> None:
        if remembered <= 0:
            raise ConfigError(f"regret needs at least one remembered eviction: {remembered}")
        self._policy = policy
        self._remembered = remembered
        self._evictions = 0
        self._victims: OrderedDict[Mark, tuple[float, float, int]] = OrderedDict()
        self._recency = self._efficiency = 0.5
        self._policy.alpha = 1.0

    def evicted(self, mark: Mark, scores: tuple[float, float]) -> None:
        """`mark` lost its state; remember what either expert had said of it: normalised recency and efficiency."""
        self._evictions += 1
        recency, efficiency = scores
        self._victims[mark] = (recency, efficiency, self._evictions)
        if len(self._victims) > self._remembered:
            self._victims.popitem(last=False)

    def missed(self, mark: Mark) -> None:
        """A request would have resumed from `mark` if it still had its checkpoint."""
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
