"""Who may take how much of the budget: on demand (ours), a static split, and AVMP's rule over the same pools."""

from dataclasses import dataclass
from typing import Protocol

from avmp.limits import LimitedBudget, page_bytes
from avmp.pressure import AvmpConfig, PressureMonitor
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.memory.pool import Pool


@dataclass(frozen=True)
class Transfer:
    """Move `granules` of one pool's limit to another's."""

    donor: str
    recipient: str
    granules: int


class RebalancePolicy(Protocol):
    """Asked once after a pool was refused memory."""

    def decide(self, budget: LimitedBudget) -> Transfer | None:
        """The transfer to make, or None; `budget.refused` names the pool that came short."""
        ...


class OnDemand:
    """No split, so nothing to move: a granule belongs to whoever uses it. Also the policy of a static split."""

    def decide(self, budget: LimitedBudget) -> Transfer | None:
        """See RebalancePolicy."""
        return None


class Avmp:
    """AVMP's migration over two limits: one batch from the other pool, by its trigger, thresholds and interval.

    Unlike the released prototype nothing is reserved twice, and any unused granule can move, not only the highest.
    """

    def __init__(self, config: AvmpConfig) -> None:
        self.monitor = PressureMonitor(config)

    def decide(self, budget: LimitedBudget) -> Transfer | None:
        """See RebalancePolicy."""
        if budget.refused not in ("kv", "state"):
            return None
        kv, state = (budget.pools[name] for name in ("kv", "state"))
        self.monitor.observe(_unused_fraction(budget, kv), _unused_fraction(budget, state))
        donor, recipient = (state, kv) if budget.refused == kv.name else (kv, state)
        if not self.monitor.start(_unused_fraction(budget, donor)):
            return None
        unit_bytes = page_bytes(donor.layout)
        granules = max(1, self.monitor.config.batch_units * unit_bytes // budget.granule_bytes)
        spare = budget.limits[donor.name] - donor.columns.used_granules
        return Transfer(donor.name, recipient.name, granules) if granules <= spare else None


def split(budget: LimitedBudget, state_fraction: float) -> dict[str, int]:
    """Limits in granules: `state` gets its fraction of `budget`, `kv` the rest, as with SGLang's static ratio."""
    if not 0.0 < state_fraction < 1.0:
        raise ConfigError(f"the state share of the memory must lie between 0 and 1: {state_fraction}")
    granules = int(budget.total * state_fraction)
    return {"kv": budget.total - granules, "state": granules}


def apply(budget: LimitedBudget, transfer: Transfer) -> None:
    """Carry `transfer` out. Raises ConfigError if the donor uses what it should give."""
    donor = budget.pools[transfer.donor]
    left = budget.limits[transfer.donor] - transfer.granules
    if left < donor.columns.used_granules:
        raise ConfigError(f"pool {transfer.donor!r} uses what it should give; transfer less: {transfer.granules}")
    budget.limits[transfer.donor] = left
    budget.limits[transfer.recipient] += transfer.granules


def _unused_fraction(budget: LimitedBudget, pool: Pool) -> float:
    limit = budget.limits[pool.name]
    return 1.0 - pool.columns.used_granules / limit if limit else 0.0
